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


def expand(x: Tensor, coefficients: Coefficients, dtype: torch.dtype, weights: Weights | None = None) -> Tensor:
    """The features of x [n, K, C], times their weights if it is a query: [n, F, C] of this dtype."""
    (c0, c1, c2), (n, K, C) = coefficients, x.shape
    w0, w1, w2 = (1.0, 1.0, 1.0) if weights is None else weights
    lower, shifts = (c0 != 0) + (c1 != 0) * K, (K // 2 + 1) * (c2 != 0)
    phi = x.new_empty(n, lower + K * shifts, C, dtype=dtype)
    if c0 != 0:
        phi[:, 0] = w0
    if c1 != 0:
        phi[:, lower - K : lower] = x.to(dtype) * w1
    if c2 == 0:
        return phi
    around = _around(x, dtype)
    left, shifted = around[:, None, :K], around.unfold(1, K, 1).transpose(2, 3)  # [n,1,K,C], [n,shifts,K,C]
    left = left if weights is None else left * (2 * w2)
    pairs = phi[:, lower:].unflatten(1, (shifts, K))
    if torch.compiler.is_compiling():  # torch.compile does not trace out= of a view
        pairs.copy_(left * shifted)
    else:
        torch.mul(left, shifted, out=pairs)
    if weights is not None:
        pairs[:, 0].mul_(0.5)
    return phi[:, : lower + K * (K + 1) // 2]


def contract(d_phi: Tensor, x: Tensor, coefficients: Coefficients, weights: Weights | None = None) -> Tensor:
    """The gradient at x of expand: d_phi [n, F, C], x [n, K, C] -> dx [n, K, C]."""
    (c0, c1, c2), K = coefficients, x.shape[1]
    _, w1, w2 = (1.0, 1.0, 1.0) if weights is None else weights
    lower = (c0 != 0) + (c1 != 0) * K
    d_linear = d_phi[:, lower - K : lower] * w1 if c1 != 0 else None
    if c2 == 0:
        return torch.zeros_like(x) if d_linear is None else d_linear
    left = x if weights is None else x * (2 * w2)
    every = d_phi.index_select(1, _pair_numbers(K, x.device) + lower).unflatten(1, (K, K))  # [n,K,K,C], symmetric
    dx = every.mul_(left.unsqueeze(1)).sum(2)
    if weights is None:
        dx.addcmul_(d_phi[:, lower : lower + K], x)  # x_a^2 has twice the slope of a pair; of a query it counts half
    return dx if d_linear is None else dx.add_(d_linear)


@cached
def _pair_numbers(K: int, device: torch.device) -> Tensor:
    """[K*K]: the number of x_a x_b among the features of degree 2, for all (a, b)."""
    with torch.inference_mode(False):
        a, b = pair_indices(K, device)
        numbers = torch.empty(K, K, dtype=torch.long, device=device)
        numbers[a, b] = numbers[b, a] = state_order(K, (0.0, 0.0, 1.0), device)
        return numbers.flatten()


def _around(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x [n, K, C] and once more its first half: [n, K + K // 2, C]."""
    n, K, C = x.shape
    around = x.new_empty(n, K + K // 2, C, dtype=dtype)
    around[:, :K] = x
    around[:, K:] = x[:, : K // 2]
    return around
