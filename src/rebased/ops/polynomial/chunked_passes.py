"""The forward and the backward pass of the chunked path. Derivation: docs/math.md.

With v' = [v, 1], one pass over the tokens sums numerator and denominator at once, o = num / (den + eps). With
g' = [do, -(do . o)] / (den + eps), two more give the gradients.
"""

import torch
from torch import Tensor

from rebased.ops.backend import accumulate_dtype
from rebased.ops.polynomial import chunked_sums
from rebased.ops.polynomial.similarity import Kernel
from rebased.ops.polynomial.state import EVERY_DEGREE, divisor, feature_count

NO_DOUBLE_BACKWARD = (
    "the chunked path of polynomial attention has first derivatives only; "
    'for second derivatives pass backend="reference"'
)


def forward(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor | None, kernel: Kernel, eps: float
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """(o, state after or None) of (q, k, v, state or None); a state here is kv and z side by side [B, H, F, V+1].

    Two more outputs are only for the backward: o before it was rounded to half precision (else None), and the
    denominator [B, T, H, 1].
    """
    o = v.new_empty(v.shape, dtype=accumulate_dtype(v.dtype))
    denominator = o.new_empty(*v.shape[:3], 1)

    def divide(at: chunked_sums.At, sums: Tensor) -> None:
        below = divisor(sums[..., -1:], eps)
        chunked_sums.put(o[at], sums[..., :-1] / below)
        chunked_sums.put(denominator[at], below)

    after = chunked_sums.sums(kernel, q, k, v, state, divide, want_state=state is not None)
    if o.dtype == v.dtype:
        return o, after, None, denominator
    return o.to(v.dtype), after, o, denominator


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor | None,
    o: Tensor,
    denominator: Tensor,
    do: Tensor | None,
    d_after: Tensor | None,
    kernel: Kernel,
    needed: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """The gradients of q, k, v and the state, of those that are needed, from the gradients of o and the state after."""
    do = torch.zeros_like(o) if do is None else do
    last = (do * o).sum(-1, keepdim=True).neg_()

    def gradient_of_sums(at: chunked_sums.At, L: int) -> Tensor:
        below = chunked_sums.chunks_first(denominator[at], L).flatten(0, 2)
        return chunked_sums.beside(do[at], last[at], L).div_(below)

    return chunked_sums.gradients(kernel, q, k, v, gradient_of_sums, state, d_after, needed)


def coefficient_gradient(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor | None, o: Tensor, denominator: Tensor, do: Tensor, scale: float
) -> Tensor:
    """The gradient of (c0, c1, c2), [3] in fp64: of c_d it is sum_i g'_i . sum_j s_ij^d v'_j.

    The inner sums are a forward pass with the similarity s^d, whose features are those of degree d alone.
    """
    K = q.shape[3]
    do = do.to(o.dtype)
    g1 = torch.cat([do, -(do * o).sum(-1, keepdim=True)], dim=-1).double().div_(denominator)
    sums = torch.empty_like(g1, dtype=o.dtype)
    bounds = (0, 1, 1 + K, feature_count(K, EVERY_DEGREE))
    found = []
    for degree in range(3):
        one = Kernel((float(degree == 0), float(degree == 1), float(degree == 2)), scale)
        part = None if state is None else state[:, :, bounds[degree] : bounds[degree + 1]]
        chunked_sums.sums(one, q, k, v, part, lambda at, group: chunked_sums.put(sums[at], group))
        found.append((g1 * sums).sum())
    return torch.stack(found)
