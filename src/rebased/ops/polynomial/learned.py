"""Polynomial attention whose coefficients are a tensor that wants gradients: the chunked path, on every device.

There is no kernel for it. On a GPU it is plain torch too, which a note says once.
"""

from typing import Any

import torch
from torch import Tensor

from rebased.ops.polynomial import chunked
from rebased.ops.polynomial.similarity import LearnedKernel
from rebased.ops.polynomial.state import PolyState


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
        o, after, o_wide, denominator = chunked.forward(q, k, v, state, kernel, eps)
        ctx.save_for_backward(q, k, v, state, o if o_wide is None else o_wide, denominator, c)
        ctx.scale = scale
        ctx.set_materialize_grads(False)
        return o, after

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, do: Tensor | None, d_after: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, state, o, denominator, c = ctx.saved_tensors
        kernel = LearnedKernel(c.detach(), ctx.scale)
        found = chunked.backward(q, k, v, state, o, denominator, do, d_after, kernel, ctx.needs_input_grad[:4])
        dc = None
        if ctx.needs_input_grad[4] and do is not None:  # the state after does not depend on the coefficients
            dc = chunked.coefficient_gradient(q, k, v, state, o, denominator, do, ctx.scale).to(c.dtype)
        return *found, dc, None, None
