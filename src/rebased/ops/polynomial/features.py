"""The features of polynomial attention with tokens as the last axis, and their derivative: fast inside a chunk.

Their order is not that of state.py. Degree 2 is x_a x_(a+d) with a + d modulo K, for d = 0, then d = 1, up to K / 2 (of
which only the first half is new where K is even): one multiplication of x with shifted views of itself. `state_order`
translates.
"""

import torch
from torch import Tensor

from rebased.ops.polynomial.state import Coefficients, cached, pair_indices

Weights = tuple[float | Tensor, float | Tensor, float | Tensor]
"""Of the features of degree 0, 1 and 2 of a query. Those of a pair a != b count twice. Keys have none."""


@cached
def state_order(K: int, coefficients: Coefficients, device: torch.device) -> Tensor:
    """[F]: the number that each feature of state.py has here."""
    c0, c1, c2 = coefficients
    with torch.inference_mode(False):  # cached for later calls, which may need gradients
        lower = (c0 != 0) + (c1 != 0) * K
        numbers = torch.arange(lower, device=device)
        if c2 == 0:
            return numbers
        a, b = pair_indices(K, device)
        pairs = torch.where(b - a <= K // 2, K * (b - a) + a, K * (K - b + a) + b)
        return torch.cat([numbers, lower + pairs])


def expand(x: Tensor, coefficients: Coefficients, weights: Weights | None = None) -> Tensor:
    """The features of x [n, K, C], times their weights if it is a query: [n, F, C]."""
    (c0, c1, c2), (n, K, C) = coefficients, x.shape
    w0, w1, w2 = (1.0, 1.0, 1.0) if weights is None else weights
    lower, shifts = (c0 != 0) + (c1 != 0) * K, K // 2 + 1
    phi = x.new_empty(n, lower + K * shifts * (c2 != 0), C)
    if c0 != 0:
        phi[:, 0] = w0
    if c1 != 0:
        phi[:, lower - K : lower] = x * w1
    if c2 != 0:
        shifted = torch.cat([x, x[:, : K // 2]], dim=1).unfold(1, K, 1).transpose(2, 3)  # [n,shifts,K,C]
        left = x if weights is None else x * (2 * w2)
        pairs = phi[:, lower:].unflatten(1, (shifts, K))
        if torch.compiler.is_compiling():  # torch.compile does not trace out= of a view
            pairs.copy_(left.unsqueeze(1) * shifted)
        else:
            torch.mul(left.unsqueeze(1), shifted, out=pairs)
        if weights is not None:
            phi[:, lower : lower + K] *= 0.5
    return phi[:, : lower + K * (K + 1) // 2 * (c2 != 0)]


@cached
def _rows_of_pairs(K: int, device: torch.device) -> Tensor:
    """[K*K]: the number of the pair feature x_a x_b, for all (a, b)."""
    with torch.inference_mode(False):
        a, b = pair_indices(K, device)
        pair = torch.empty(K, K, dtype=torch.long, device=device)
        pair[a, b] = pair[b, a] = state_order(K, (0.0, 0.0, 1.0), device)
        return pair.flatten()


def contract(d_phi: Tensor, x: Tensor, coefficients: Coefficients, weights: Weights | None = None) -> Tensor:
    """The gradient at x of expand: d_phi [n, F, C], x [n, K, C] -> dx [n, K, C]."""
    (c0, c1, c2), K = coefficients, x.shape[1]
    _, w1, w2 = (1.0, 1.0, 1.0) if weights is None else weights
    d_linear = d_phi[:, (c0 != 0) : (c0 != 0) + K] * w1 if c1 != 0 else None
    if c2 == 0:
        return torch.zeros_like(x) if d_linear is None else d_linear
    d_pairs = d_phi[:, (c0 != 0) + (c1 != 0) * K :]
    left = x if weights is None else x * (2 * w2)
    dx = d_pairs.index_select(1, _rows_of_pairs(K, x.device)).unflatten(1, (K, K)).mul_(left.unsqueeze(1)).sum(2)
    if weights is None:
        dx.addcmul_(d_pairs[:, :K], x)  # x_a^2 has twice the slope of a pair; as a query's feature it counts half
    return dx if d_linear is None else dx.add_(d_linear)
