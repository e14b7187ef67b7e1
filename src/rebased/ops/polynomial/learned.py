"""Polynomial attention whose coefficients are a tensor that wants gradients: the chunked path, on every device.

There is no kernel for it. On a GPU it is plain torch too, which a note says once. `complete_square` is a way around it.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rebased.ops.backend import accumulate_dtype
from rebased.ops.derivatives import first_derivatives_only
from rebased.ops.polynomial import chunked_passes
from rebased.ops.polynomial.similarity import LearnedKernel
from rebased.ops.polynomial.state import Coefficients, PolyState

COMPLETED: Coefficients = (1.0, 0.0, 1.0)
"""The coefficients for queries and keys of `complete_square`."""


def attend(q: Tensor, k: Tensor, v: Tensor, *, coefficients: Tensor, scale: float, eps: float) -> Tensor:
    """o [B, T, H, V] of q, k [B, T, H, K] and v [B, T, H, V]. Differentiable once, in the coefficients [3] too."""
    _refuse_compilation()
    o: Tensor = _Attention.apply(q, k, v, None, coefficients, scale, eps)[0]
    return o


def extend(
    q: Tensor, k: Tensor, v: Tensor, state: PolyState, *, coefficients: Tensor, scale: float, eps: float
) -> tuple[Tensor, PolyState]:
    """attend for tokens that follow a state, and the state after them. Differentiable once."""
    _refuse_compilation()
    before = torch.cat([state.kv, state.z.unsqueeze(-1)], dim=-1)  # [B, H, F, V+1]
    o, after = _Attention.apply(q, k, v, before, coefficients, scale, eps)
    return o, PolyState(kv=after[..., :-1].contiguous(), z=after[..., -1].contiguous())


def complete_square(q: Tensor, k: Tensor, coefficients: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Queries and keys into which learnt coefficients have gone: c0 + c1 s + c2 s^2 = r (1 + (q' . k')^2).

    With them poly_attention takes the GPU's kernels: call it with coefficients=COMPLETED and scale=1. The factor
    r = c0 - c1^2 / (4 c2) cancels in o; only eps counts r times.

    Args:
        q, k: [B, T, H, K].
        coefficients: tensor [3] with c2 > 0 and r > 0, which holds if every similarity is positive. Else the result is
            NaN.
        scale: factor of q . k in s.

    Returns:
        q', k' [B, T, H, K'] in the dtypes of q and k. K' is K + 2 rounded up to a multiple of 8, because kernels read 8
        columns at once; the last columns are zero.
    """
    c0, c1, c2 = coefficients.double().unbind()
    r = c0 - c1**2 / (4 * c2)
    factor, shift = scale * (c2 / r).sqrt(), c1 / (2 * (c2 * r).sqrt())  # q' . k' = factor q . k + shift
    high = shift.to(q.dtype)
    low = (shift - high.double()).to(q.dtype)  # what half precision has rounded off
    zeros = -(q.shape[3] + 2) % 8
    shifts = functional.pad(torch.stack([high, low]), (0, zeros)).expand(*q.shape[:3], -1)
    ones = functional.pad(k.new_ones(2), (0, zeros)).expand(*k.shape[:3], -1)
    wide = accumulate_dtype(q.dtype)
    scaled = (q.to(wide) * factor.to(wide)).to(q.dtype)
    return torch.cat([scaled, shifts], dim=-1), torch.cat([k, ones], dim=-1)


def _refuse_compilation() -> None:
    """While torch.compile traces, raise an error: it then runs the call uncompiled. Torch 2.11 compiles a custom
    backward that writes into slices to zero gradients; torch.compiler.disable would import the compiler right here."""
    if torch.compiler.is_compiling():
        raise RuntimeError("polynomial attention with learnt coefficients cannot be compiled with fullgraph=True")


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, state: Tensor | None, c: Tensor, scale: float, eps: float
    ) -> tuple[Tensor, Tensor | None]:
        kernel = LearnedKernel(c.detach(), scale)
        o, after, o_wide, denominator = chunked_passes.forward(q, k, v, state, kernel, eps)
        ctx.save_for_backward(q, k, v, state, o if o_wide is None else o_wide, denominator, c)
        ctx.scale = scale
        ctx.set_materialize_grads(False)
        return o, after

    @staticmethod
    @first_derivatives_only("the chunked path of polynomial attention with learnt coefficients")
    def backward(ctx: Any, do: Tensor | None, d_after: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, state, o, denominator, c = ctx.saved_tensors
        kernel = LearnedKernel(c.detach(), ctx.scale)
        found = chunked_passes.backward(q, k, v, state, o, denominator, do, d_after, kernel, ctx.needs_input_grad[:4])
        dc = None
        if ctx.needs_input_grad[4] and do is not None:  # the state after does not depend on the coefficients
            dc = chunked_passes.coefficient_gradient(q, k, v, state, o, denominator, do, ctx.scale).to(c.dtype)
        return *found, dc, None, None
