"""The forward and the backward pass of the chunked path. Derivation: docs/math.md.

With v' = [v, 1], one pass over the tokens sums numerator and denominator at once, o = num / (den + eps). With
g' = [do, -(do . o)] / (den + eps), two more give the gradients.
"""

import torch
from torch import Tensor

from rebased.ops.backend import accumulate_dtype
from rebased.ops.polynomial import chunked_sums
from rebased.ops.polynomial.chunk_plan import plan_pass
from rebased.ops.polynomial.similarity import Kernel
from rebased.ops.polynomial.state import EVERY_DEGREE, feature_count

NO_DOUBLE_BACKWARD = (
    "the chunked path of polynomial attention has first derivatives only; "
    'for second derivatives pass backend="reference"'
)
CANCELLED = 1024.0  # roundoffs of its terms that a sum may be off by before it is computed in fp64


def forward(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor | None, kernel: Kernel, eps: float
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """(o, state after or None) of (q, k, v, state or None); a state here is kv and z side by side [B, H, F, V+1].

    Two more outputs are only for the backward: o before it was rounded to half precision (else None), and the
    denominator [B, T, H, 1].
    """
    narrow = _may_be_narrow(q, v, state, kernel)
    o, after, denominator = _attend(q, k, v, state, kernel, eps, accumulate_dtype(v.dtype) if narrow else _wide(v))
    if narrow and (cancelled := find_cancelled(q, k, v, denominator, kernel)).any():
        rows = cancelled.any(1)
        q, k, v, late, o_before, before = _rows(rows, q, k, v, cancelled.unsqueeze(3), o, denominator)
        o_exact, _, exact = _attend(q, k, v, None, kernel, eps, _wide(v))
        _put_rows(o, rows, torch.where(late, o_exact, o_before))
        _put_rows(denominator, rows, torch.where(late, exact, before))
    if o.dtype == v.dtype:
        return o, after, None, denominator
    return o.to(v.dtype), after, o, denominator


def _attend(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor | None, kernel: Kernel, eps: float, state_dtype: torch.dtype
) -> tuple[Tensor, Tensor | None, Tensor]:
    """o in the dtype of sums, the state after, and the denominator. Sums over chunks are kept in state_dtype."""
    o = v.new_empty(v.shape, dtype=accumulate_dtype(v.dtype))
    denominator = o.new_empty(*v.shape[:3], 1)

    def divide(at: chunked_sums.At, sums: Tensor) -> None:
        below = sums[..., -1:].add_(eps)
        chunked_sums.put(o[at], sums[..., :-1] / below)
        chunked_sums.put(denominator[at], below)

    want_state = state is not None
    after = chunked_sums.sums(kernel, q, k, v, state, divide, state_dtype=state_dtype, want_state=want_state)
    return o, after, denominator


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
    if not _may_be_narrow(q, v, state, kernel):
        return _gradients(q, k, v, state, o, denominator, do, d_after, kernel, needed, _wide(v))
    narrow = accumulate_dtype(v.dtype)
    found = _gradients(q, k, v, None, o, denominator, do, None, kernel, needed, narrow)
    if (dv := found[2]) is not None:
        rows = find_cancelled(q, k, v, denominator, kernel).any(1)
        if rows.any():
            q, k, v, o, denominator, do = _rows(rows, q, k, v, o, denominator, do)
            only_v = (False, False, True, False)
            exact = _gradients(q, k, v, None, o, denominator, do, None, kernel, only_v, _wide(v))[2]
            assert exact is not None
            _put_rows(dv, rows, exact)
    return found


def _gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor | None,
    o: Tensor,
    denominator: Tensor,
    do: Tensor,
    d_after: Tensor | None,
    kernel: Kernel,
    needed: tuple[bool, ...],
    state_dtype: torch.dtype,
) -> tuple[Tensor | None, ...]:
    last = (do * o).sum(-1, keepdim=True).neg_()

    def gradient_of_sums(at: chunked_sums.At, L: int) -> Tensor:
        below = chunked_sums.chunks_first(denominator[at], L).flatten(0, 2)
        return chunked_sums.beside(do[at], last[at], L).div_(below)

    return chunked_sums.gradients(kernel, q, k, v, gradient_of_sums, state, d_after, needed, state_dtype=state_dtype)


def find_cancelled(q: Tensor, k: Tensor, v: Tensor, denominator: Tensor, kernel: Kernel) -> Tensor:
    """[B, T, H]: True from the first token on whose sums lose too many digits if sums over chunks are kept in fp32.

    The product of the features of q_i and of a state is a sum of terms as large as sum_j |q_i|^2 |k_j|^2, however small
    sum_j sim(q_i, k_j) is. Their ratio multiplies the roundoff, and so does the root of the number of chunks, whose
    sums are rounded one after the other. The ratio is K for random keys and was at most 140 in trained models; a query
    at right angles to one key far larger than all others makes it huge.
    """
    c0, c1, c2 = map(abs, kernel.coefficients)
    chunk = _chunk(q, v, kernel)
    dtype, numbers = denominator.dtype, torch.arange(1, q.shape[1] + 1, device=q.device).unsqueeze(1)
    q_squares, k_squares = (x.to(dtype).square().sum(-1) for x in (q, k))
    q_squares *= kernel.scale**2
    terms = c2 * q_squares * k_squares.cumsum(1) + c0 * numbers
    if c1 != 0:
        terms += c1 * q_squares.sqrt() * k_squares.sqrt().cumsum(1)
    cancelled = terms * (numbers / chunk).sqrt() > CANCELLED * denominator.squeeze(3).abs()  # not NaN: nothing helps it
    cancelled[:, :chunk] = False  # they read no state
    return cancelled.cumsum(1) > 0


def _chunk(q: Tensor, v: Tensor, kernel: Kernel) -> int:
    """Tokens per chunk of a call without a state."""
    return plan_pass(q, v, kernel.coefficients, reads_first=False, writes_last=False).chunk


def _may_be_narrow(q: Tensor, v: Tensor, state: Tensor | None, kernel: Kernel) -> bool:
    """True if sums over chunks may first be kept in fp32, half the work: on a CPU, where looking at the result costs
    little, if random keys would not cancel. A state of earlier tokens does not tell how large their keys were."""
    if state is not None or q.device.type != "cpu" or v.dtype == torch.float64 or isinstance(kernel.values, Tensor):
        return False
    (_, T, _, K), chunk = q.shape, _chunk(q, v, kernel)
    return chunk < T and 2 * K * (T / chunk) ** 0.5 <= CANCELLED


def _wide(v: Tensor) -> torch.dtype:
    """The dtype of a state whose products with features may cancel, where o is divided by such a product. For dq and dk
    fp32 is enough."""
    return torch.float64 if v.device.type != "mps" else accumulate_dtype(v.dtype)


def _rows(rows: Tensor, *tensors: Tensor) -> list[Tensor]:
    """The heads of a batch that are True in rows [B, H], of tensors [B, T, H, .]: [R, T, 1, .] each."""
    return [x.transpose(1, 2)[rows].unsqueeze(2) for x in tensors]


def _put_rows(target: Tensor, rows: Tensor, values: Tensor) -> None:
    """The inverse of _rows: writes values [R, T, 1, .] to target [B, T, H, .]."""
    target.transpose(1, 2)[rows] = values.squeeze(2).to(target.dtype)


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
        chunked_sums.sums(one, q, k, v, part, lambda at, group: chunked_sums.put(sums[at], group), state_dtype=_wide(v))
        found.append((g1 * sums).sum())
    return torch.stack(found)
