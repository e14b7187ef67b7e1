"""Polynomial attention in linear time, in plain torch: the path of CPUs. Derivation: docs/math.md.

Coefficients in a tensor take it on every device: there is no kernel for them.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rebased.ops.backend import accumulate_dtype
from rebased.ops.polynomial.chunked_passes import NO_DOUBLE_BACKWARD, backward, coefficient_gradient, forward
from rebased.ops.polynomial.chunked_recurrence import Rule, recur
from rebased.ops.polynomial.gates import bounded
from rebased.ops.polynomial.similarity import Kernel
from rebased.ops.polynomial.state import AnyCoefficients, Coefficients, PolyState, divisor, init_poly_state


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    coefficients: AnyCoefficients,
    scale: float,
    eps: float,
    log_decay: Tensor | None = None,
) -> Tensor:
    """o [B, T, H, V] of q, k [B, T, H, K] and v [B, T, H, V]. Differentiable once, also in a tensor of coefficients."""
    if log_decay is not None:
        (B, _, H, K), V = q.shape, v.shape[3]
        state = init_poly_state(B, H, K, V, coefficients, device=q.device, dtype=q.dtype)
        return extend(q, k, v, state, coefficients=coefficients, scale=scale, eps=eps, log_decay=log_decay)[0]
    return _attend(q, k, v, None, coefficients, scale, eps)[0]


def extend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: PolyState,
    *,
    coefficients: AnyCoefficients,
    scale: float,
    eps: float,
    log_decay: Tensor | None = None,
) -> tuple[Tensor, PolyState]:
    """attend for tokens that follow a state, and the state after them. Differentiable once."""
    before = torch.cat([state.kv, state.z.unsqueeze(-1)], dim=-1)  # [B, H, F, V+1]
    if log_decay is None:
        o, after = _attend(q, k, v, before, coefficients, scale, eps)
    else:
        assert not isinstance(coefficients, Tensor)
        o, after = _attend_gated(q, k, v, before, log_decay, coefficients, scale, eps)
    return o, PolyState(kv=after[..., :-1].contiguous(), z=after[..., -1].contiguous())


def _attend(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor | None, coefficients: AnyCoefficients, scale: float, eps: float
) -> tuple[Tensor, Tensor]:
    """o, and the state after the tokens if there is one before them."""
    if not isinstance(coefficients, Tensor):
        if torch.compiler.is_compiling():
            from rebased.ops.polynomial import chunked_operators  # here: registering operators is not for every import

            return chunked_operators.attend(q, k, v, state, coefficients, scale, eps)
        return _Attention.apply(q, k, v, state, None, Kernel(coefficients, scale), eps)[:2]
    # Torch 2.11 compiles a custom backward that writes into slices to zero gradients. After this error torch.compile
    # runs the call uncompiled; torch.compiler.disable would import the compiler right here.
    if torch.compiler.is_compiling():
        raise RuntimeError("polynomial attention with learnt coefficients cannot be compiled with fullgraph=True")
    return _Attention.apply(q, k, v, state, coefficients, Kernel(coefficients.detach(), scale), eps)[:2]


def _attend_gated(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    log_decay: Tensor,
    coefficients: Coefficients,
    scale: float,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """_attend with a gate. The state is read in fp64, as without one: the sums of features cancel."""
    dtype = accumulate_dtype(v.dtype)
    rule = Rule(coefficients, scale, torch.float64 if v.device.type != "mps" else dtype)
    u = functional.pad(v.to(dtype), (0, 1), value=1.0)  # [v, 1]: numerator and denominator in one pass
    sums, after = recur(q.to(dtype), k.to(dtype), u, bounded(log_decay.to(dtype)), None, state, rule)
    return (sums[..., :-1] / divisor(sums[..., -1:], eps)).to(v.dtype), after


class _Attention(torch.autograd.Function):
    """`forward` for autograd: of q, k, v, a state, coefficients in a tensor, the kernel with them, and eps."""

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, state: Tensor | None, c: Tensor | None, kernel: Kernel, eps: float
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
        return forward(q, k, v, state, kernel, eps)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        q, k, v, state, c, ctx.kernel, _ = inputs
        o, _, o_wide, denominator = output
        ctx.save_for_backward(q, k, v, state, c, o if o_wide is None else o_wide, denominator)
        ctx.mark_non_differentiable(*(x for x in (o_wide, denominator) if x is not None))
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, d_after: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        return *_Gradients.apply(*ctx.saved_tensors, do, d_after, ctx.kernel, ctx.needs_input_grad[:5]), None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[Any, Any]:
        return _fold_vmap(_Attention, info.batch_size, in_dims, inputs, tensors=5)


class _Gradients(torch.autograd.Function):
    """`backward` as a function of all that it depends on: a second derivative is then an error and never zero."""

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, state: Tensor | None, c: Tensor | None, o: Tensor, denominator: Tensor,
        do: Tensor | None, d_after: Tensor | None, kernel: Kernel, needed: tuple[bool, ...],
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        found = backward(q, k, v, state, o, denominator, do, d_after, kernel, needed[:4])
        dc = None
        if c is not None and needed[4] and do is not None:  # the state after does not depend on the coefficients
            dc = coefficient_gradient(q, k, v, state, o, denominator, do, kernel.scale).to(c.dtype)
        return *found, dc

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:
        raise RuntimeError(NO_DOUBLE_BACKWARD)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[Any, Any]:
        return _fold_vmap(_Gradients, info.batch_size, in_dims, inputs, tensors=9)


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
