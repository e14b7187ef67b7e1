"""Polynomial attention in linear time, in plain torch: the path of CPUs. Derivation: docs/math.md."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rebased.ops.backend import accumulate_dtype
from rebased.ops.polynomial.chunked_passes import NO_DOUBLE_BACKWARD, backward, forward
from rebased.ops.polynomial.chunked_recurrence import Rule, recur
from rebased.ops.polynomial.gates import bounded
from rebased.ops.polynomial.similarity import Kernel
from rebased.ops.polynomial.state import Coefficients, PolyState, init_poly_state


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    coefficients: Coefficients,
    scale: float,
    eps: float,
    log_decay: Tensor | None = None,
) -> Tensor:
    """o [B, T, H, V] of q, k [B, T, H, K] and v [B, T, H, V]. Differentiable once."""
    if log_decay is not None:
        (B, _, H, K), V = q.shape, v.shape[3]
        state = init_poly_state(B, H, K, V, coefficients, device=q.device, dtype=q.dtype)
        return _extend_gated(q, k, v, state, log_decay, coefficients, scale, eps)[0]
    if torch.compiler.is_compiling():
        from rebased.ops.polynomial import chunked_operators  # here: registering operators is not for every import

        return chunked_operators.attend(q, k, v, None, coefficients, scale, eps)[0]
    return _Attention.apply(q, k, v, None, Kernel(coefficients, scale), eps)[0]


def extend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: PolyState,
    *,
    coefficients: Coefficients,
    scale: float,
    eps: float,
    log_decay: Tensor | None = None,
) -> tuple[Tensor, PolyState]:
    """attend for tokens that follow a state, and the state after them. Differentiable once."""
    if log_decay is not None:
        return _extend_gated(q, k, v, state, log_decay, coefficients, scale, eps)
    before = torch.cat([state.kv, state.z.unsqueeze(-1)], dim=-1)  # [B, H, F, V+1]
    if torch.compiler.is_compiling():
        from rebased.ops.polynomial import chunked_operators

        o, after = chunked_operators.attend(q, k, v, before, coefficients, scale, eps)
    else:
        o, after, _, _ = _Attention.apply(q, k, v, before, Kernel(coefficients, scale), eps)
    return o, PolyState(kv=after[..., :-1].contiguous(), z=after[..., -1].contiguous())


def _extend_gated(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: PolyState,
    log_decay: Tensor,
    coefficients: Coefficients,
    scale: float,
    eps: float,
) -> tuple[Tensor, PolyState]:
    """extend with a gate. The state is read in fp64, as without one: the sums of features cancel."""
    dtype = accumulate_dtype(v.dtype)
    wide = torch.float64 if v.device.type != "mps" else dtype
    u = functional.pad(v.to(dtype), (0, 1), value=1.0)  # [v, 1]: numerator and denominator in one pass
    before = torch.cat([state.kv, state.z.unsqueeze(-1)], dim=-1)  # [B, H, F, V+1]
    rule = Rule(coefficients, scale, wide)
    sums, after = recur(q.to(dtype), k.to(dtype), u, bounded(log_decay.to(dtype)), None, before, rule)
    o = (sums[..., :-1] / (sums[..., -1:] + eps)).to(v.dtype)
    return o, PolyState(kv=after[..., :-1].contiguous(), z=after[..., -1].contiguous())


class _Attention(torch.autograd.Function):
    """`forward` for autograd."""

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
        return forward(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        q, k, v, state, ctx.kernel, _ = inputs
        o, _, o_wide, denominator = output
        ctx.save_for_backward(q, k, v, state, o if o_wide is None else o_wide, denominator)
        ctx.mark_non_differentiable(*(x for x in (o_wide, denominator) if x is not None))
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, d_after: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        return *_Gradients.apply(*ctx.saved_tensors, do, d_after, ctx.kernel, ctx.needs_input_grad[:4]), None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[Any, Any]:
        return _fold_vmap(_Attention, info.batch_size, in_dims, inputs, tensors=4)


class _Gradients(torch.autograd.Function):
    """`backward` as a function of all that it depends on: a second derivative is then an error and never zero."""

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor | None, ...]:
        return backward(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:
        raise RuntimeError(NO_DOUBLE_BACKWARD)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[Any, Any]:
        return _fold_vmap(_Gradients, info.batch_size, in_dims, inputs, tensors=8)


def _fold_vmap(
    function: Any, size: int, in_dims: tuple[Any, ...], inputs: tuple[Any, ...], tensors: int
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """torch.func.vmap over a function whose first `tensors` inputs have the batch axis first: the axis is folded into
    the batch and unfolded from the outputs."""

    def fold(x: Tensor | None, dim: int | None) -> Tensor | None:
        if x is None:
            return None
        batched = x.movedim(dim, 0) if dim is not None else x.expand(size, *x.shape)
        return batched.flatten(0, 1)

    folded = [fold(x, dim) for x, dim in zip(inputs[:tensors], in_dims, strict=False)]
    outputs = function.apply(*folded, *inputs[tensors:])
    unfolded = tuple(None if x is None else x.unflatten(0, (size, -1)) for x in outputs)
    return unfolded, tuple(None if x is None else 0 for x in outputs)
