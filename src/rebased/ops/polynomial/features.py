"""The features of polynomial attention with tokens as the last axis, and their derivative: fast inside a chunk.

The order of the features is that of state.py. Rows are selected from one outer product: on a CPU that is three times
faster than one multiplication per row, and six times faster than gathering along the last axis.
"""

import torch
from torch import Tensor

from rebased.ops.polynomial.state import Coefficients, cached, pair_indices


@cached
def _rows_of_outer(K: int, coefficients: Coefficients, device: torch.device) -> Tensor:
    """[F]: the row of each feature in the outer product of [1, x] with itself, or of x with itself if only c2 != 0."""
    c0, c1, c2 = coefficients
    with torch.inference_mode(False):
        a, b = pair_indices(K, device)
        if c0 == 0 and c1 == 0:
            return a * K + b
        rows = [torch.arange(0 if c0 != 0 else 1, K + 1 if c1 != 0 else 1, device=device)]
        return torch.cat([*rows, (a + 1) * (K + 1) + b + 1] if c2 != 0 else rows)


def expand(x: Tensor, coefficients: Coefficients) -> Tensor:
    """The features phi of x: [n, K, C] -> [n, F, C]."""
    K = x.shape[1]
    z = x if coefficients[:2] == (0, 0) else torch.cat([torch.ones_like(x[:, :1]), x], dim=1)
    outer = (z.unsqueeze(2) * z.unsqueeze(1)).flatten(1, 2)
    return outer.index_select(1, _rows_of_outer(K, coefficients, x.device))


@cached
def _rows_of_pairs(K: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """[K*K] and [K]: the number of the pair feature x_a x_b, for all (a, b) and for a = b."""
    with torch.inference_mode(False):
        a, b = pair_indices(K, device)
        pair = torch.empty(K, K, dtype=torch.long, device=device)
        pair[a, b] = pair[b, a] = torch.arange(len(a), device=device)
        return pair.flatten(), pair.diagonal().contiguous()


def contract(d_phi: Tensor, x: Tensor, coefficients: Coefficients) -> Tensor:
    """The gradient at x of expand: d_phi [n, F, C], x [n, K, C] -> dx [n, K, C]."""
    c0, c1, c2 = coefficients
    K = x.shape[1]
    d_phi = d_phi[:, (c0 != 0) :]
    linear = d_phi[:, :K] if c1 != 0 else 0
    if c2 == 0:
        return torch.zeros_like(x) + linear
    d_pairs = d_phi[:, K:] if c1 != 0 else d_phi
    every, diagonal = _rows_of_pairs(K, x.device)
    dx = d_pairs.index_select(1, every).unflatten(1, (K, K)).mul_(x.unsqueeze(1)).sum(2)
    return dx.addcmul_(d_pairs.index_select(1, diagonal), x).add_(linear)
