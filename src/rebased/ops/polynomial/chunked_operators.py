"""The chunked path as operators for torch.compile, which then does not trace its loops.

A graph of the loops would be long and hold for one T. Torch 2.11 also compiles them to wrong gradients: it loses what a
custom backward writes into slices of a tensor.
"""

from typing import Any

import torch
from torch import Tensor

from rebased.ops.backend import accumulate_dtype
from rebased.ops.polynomial import chunked_passes
from rebased.ops.polynomial.similarity import Kernel
from rebased.ops.polynomial.state import Coefficients, feature_count


def attend(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor | None, coefficients: Coefficients, scale: float, eps: float
) -> tuple[Tensor, Tensor]:
    """o [B, T, H, V], and the state after the tokens (empty if `state` is None). See chunked.attend."""
    o, after, _, _ = chunked_forward(q, k, v, state, *coefficients, scale, eps)
    return o, after


def _filled(like: Tensor, tensors: tuple[Tensor | None, ...]) -> tuple[Any, ...]:
    """The tensors, contiguous, with an empty one for each None: an operator returns tensors of known strides."""
    empty = like.new_empty(0, dtype=accumulate_dtype(like.dtype))
    return tuple(empty.clone() if x is None else x.contiguous() for x in tensors)


@torch.library.custom_op("rebased::chunked_forward", mutates_args=())
def chunked_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor | None,
    c0: float,
    c1: float,
    c2: float,
    scale: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The outputs of chunked_passes.forward, with an empty tensor where there is none."""
    return _filled(q, chunked_passes.forward(q, k, v, state, Kernel((c0, c1, c2), scale), eps))


@chunked_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, state: Tensor | None, *_: float) -> tuple[Tensor, ...]:
    wide = accumulate_dtype(v.dtype)
    after = None if state is None else torch.empty_like(state, memory_format=torch.contiguous_format)
    o_wide = None if wide == v.dtype else v.new_empty(v.shape, dtype=wide)
    return _filled(q, (v.new_empty(v.shape), after, o_wide, v.new_empty((*v.shape[:3], 1), dtype=wide)))


@torch.library.custom_op("rebased::chunked_backward", mutates_args=())
def chunked_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor | None,
    o: Tensor,
    denominator: Tensor,
    do: Tensor | None,
    d_after: Tensor | None,
    c0: float,
    c1: float,
    c2: float,
    scale: float,
    needed: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The outputs of chunked_passes.backward, with an empty tensor where there is none."""
    kernel = Kernel((c0, c1, c2), scale)
    return _filled(q, chunked_passes.backward(q, k, v, state, o, denominator, do, d_after, kernel, tuple(needed)))


@chunked_backward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, state: Tensor | None, *others: Any) -> tuple[Tensor, ...]:
    (c0, c1, c2), needed = others[4:7], others[-1]
    given = [x.new_empty(x.shape) if need else None for x, need in zip((q, k, v), needed, strict=False)]
    B, _, H, K = q.shape
    shape = (B, H, feature_count(K, (c0, c1, c2)), v.shape[-1] + 1)
    d_state = q.new_empty(shape, dtype=accumulate_dtype(q.dtype)) if needed[3] else None
    return _filled(q, (*given, d_state))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, state, c0, c1, c2, scale, _ = inputs
    o, _, o_wide, denominator = output
    ctx.save_for_backward(q, k, v, state, o_wide if o_wide.numel() else o, denominator)
    ctx.numbers = (c0, c1, c2, scale)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, do: Tensor | None, d_after: Tensor | None, *_: Tensor | None) -> tuple[Any, ...]:
    q, k, v, state, o, denominator = ctx.saved_tensors
    needed = [bool(need) for need in ctx.needs_input_grad[:4]]
    d_after = None if state is None else d_after
    found = chunked_backward(q, k, v, state, o, denominator, do, d_after, *ctx.numbers, needed)
    return *(x if need else None for x, need in zip(found, needed, strict=True)), None, None, None, None, None


def _no_double_backward(ctx: Any, *_: Tensor | None) -> None:
    raise RuntimeError(chunked_passes.NO_DOUBLE_BACKWARD)


chunked_forward.register_autograd(_differentiate, setup_context=_save)
chunked_backward.register_autograd(_no_double_backward)
