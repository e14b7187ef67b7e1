"""Polynomial attention in linear time, in plain torch: the path of CPUs. Derivation: docs/math.md.

With v' = [v, 1], one walk over the tokens (walk.py) sums numerator and denominator at once, o = num / (den + eps). With
g' = [do, -(do . o)] / (den + eps), two more give the gradients.
"""

from typing import Any

import torch
from torch import Tensor

from rebased.ops.backend import accumulate_dtype
from rebased.ops.polynomial import walk
from rebased.ops.polynomial.similarity import AnyKernel, Kernel
from rebased.ops.polynomial.state import EVERY_DEGREE, Coefficients, PolyState, feature_count


def attend(q: Tensor, k: Tensor, v: Tensor, *, coefficients: Coefficients, scale: float, eps: float) -> Tensor:
    """o [B, T, H, V] of q, k [B, T, H, K] and v [B, T, H, V]. Differentiable once."""
    if torch.compiler.is_compiling():
        from rebased.ops.polynomial import chunked_operators  # here: registering operators is not for every import

        return chunked_operators.attend(q, k, v, None, coefficients, scale, eps)[0]
    return _Attention.apply(q, k, v, None, Kernel(coefficients, scale), eps)[0]


def extend(
    q: Tensor, k: Tensor, v: Tensor, state: PolyState, *, coefficients: Coefficients, scale: float, eps: float
) -> tuple[Tensor, PolyState]:
    """attend for tokens that follow a state, and the state after them. Differentiable once."""
    before = torch.cat([state.kv, state.z.unsqueeze(-1)], dim=-1)  # [B, H, F, V+1]
    if torch.compiler.is_compiling():
        from rebased.ops.polynomial import chunked_operators

        o, after = chunked_operators.attend(q, k, v, before, coefficients, scale, eps)
    else:
        o, after, _, _ = _Attention.apply(q, k, v, before, Kernel(coefficients, scale), eps)
    return o, PolyState(kv=after[..., :-1].contiguous(), z=after[..., -1].contiguous())


def forward(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor | None, kernel: AnyKernel, eps: float
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """(o, state after or None) of (q, k, v, state or None); a state here is kv and z side by side [B, H, F, V+1].

    Two more outputs are only for the backward: o before it was rounded to half precision (else None), and the
    denominator [B, T, H, 1].
    """
    o = v.new_empty(v.shape, dtype=accumulate_dtype(v.dtype))
    denominator = o.new_empty(*v.shape[:3], 1)

    def divide(at: walk.At, sums: Tensor) -> None:
        below = sums[..., -1:].add_(eps)
        walk.put(o[at], sums[..., :-1] / below)
        walk.put(denominator[at], below)

    after = walk.sums(kernel, q, k, v, state, divide, want_state=state is not None)
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
    kernel: AnyKernel,
    needed: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """The gradients of q, k, v and the state, of those that are needed, from the gradients of o and the state after."""
    do = torch.zeros_like(o) if do is None else do
    last = (do * o).sum(-1, keepdim=True).neg_()

    def gradient_of_sums(at: walk.At, L: int) -> Tensor:
        below = walk.chunks_first(denominator[at], L).flatten(0, 2)
        return walk.beside(do[at], last[at], L).div_(below)

    return walk.gradients(kernel, q, k, v, gradient_of_sums, state, d_after, needed)


def coefficient_gradient(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor | None, o: Tensor, denominator: Tensor, do: Tensor, scale: float
) -> Tensor:
    """The gradient of (c0, c1, c2), [3] in fp64: of c_d it is sum_i g'_i . sum_j s_ij^d v'_j.

    The inner sums are a forward walk with the similarity s^d, whose features are those of degree d alone.
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
        walk.sums(one, q, k, v, part, lambda at, group: walk.put(sums[at], group))
        found.append((g1 * sums).sum())
    return torch.stack(found)


NO_DOUBLE_BACKWARD = (
    "the chunked path of polynomial attention has first derivatives only; "
    'for second derivatives pass backend="reference"'
)


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
