"""Polynomial attention on a GPU as torch sees it: gradients, and operators for torch.compile."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rebased.ops.backend import triton_interpreted
from rebased.ops.polynomial.gpu.call import keeps_o_lo, prepare, product_dtype, rows_of
from rebased.ops.polynomial.gpu.launch import (
    BackwardInputs,
    ForwardInputs,
    ForwardOutputs,
    Gradients,
    backward,
    decode,
    decode_,
    forward,
)
from rebased.ops.polynomial.gpu.layout import canonical, tiled
from rebased.ops.polynomial.gpu.plan import MAX_KEY_WIDTH, MAX_VALUE_WIDTH
from rebased.ops.polynomial.gpu.selected import poly_at
from rebased.ops.polynomial.state import Coefficients, PolyState

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    coefficients: Coefficients,
    scale: float,
    eps: float,
    cu_seqlens: Tensor | None = None,
    log_decay: Tensor | None = None,
) -> Tensor:
    """o [B, T, H, V] of q, k [B, T, H, K] and v [B, T, H, V]; cu_seqlens [N+1] or None; log_decay [B, T, H] or None.
    See api.poly_attention."""
    _check(q)
    numbers = (*_folded(coefficients, scale), eps, False, log_decay)
    return _joined([_forward(q, k, each, cu_seqlens, None, None, *numbers)[0] for each in _slices(v)])


def attend_at(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    *,
    coefficients: Coefficients,
    scale: float,
    eps: float,
) -> Tensor:
    """o [B, n, H, V] of queries q [B, n, H, K] at positions [B, n]. See api.poly_attention_at."""
    _check(q)
    folded = _folded(coefficients, scale)
    q, k, at = rows_of(q), rows_of(k), positions.to(torch.int32).contiguous()
    return _joined([poly_at(q, k, rows_of(each), at, *folded, eps)[0] for each in _slices(v)])


def extend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: PolyState,
    *,
    coefficients: Coefficients,
    scale: float,
    eps: float,
    cu_seqlens: Tensor | None = None,
    log_decay: Tensor | None = None,
) -> tuple[Tensor, PolyState]:
    """attend for tokens that follow a public state, and the state after them. See api.poly_attention_extend."""
    _check(q)
    given = (q, k, v, *state, *(() if log_decay is None else (log_decay,)))
    if q.shape[1] == 1 and not (torch.is_grad_enabled() and any(x.requires_grad for x in given)):
        run = poly_decode if torch.compiler.is_compiling() else decode
        o, kv, z = run(q, k, v, *state, *coefficients, scale, eps, log_decay)
        return o, PolyState(kv, z)
    folded = _folded(coefficients, scale)
    K = q.shape[-1]
    outputs, states, z = [], [], state.z
    for values, kv in zip(_slices(v), _slices(state.kv), strict=True):
        before = tiled(PolyState(kv, state.z), K, coefficients)
        o, *after = _forward(q, k, values, cu_seqlens, *before, *folded, eps, True, log_decay)
        kv, z = canonical(PolyState(*after), values.shape[-1], K, coefficients)
        outputs.append(o)
        states.append(kv)
    return _joined(outputs), PolyState(_joined(states), z)


def extend_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: PolyState,
    *,
    coefficients: Coefficients,
    scale: float,
    eps: float,
    log_decay: Tensor | None = None,
) -> Tensor:
    """o of one token that follows a public state, which is overwritten. See api.poly_attention_extend_."""
    _check(q)
    if torch.compiler.is_compiling():
        return poly_decode_(q, k, v, *state, *coefficients, scale, eps, log_decay)
    return decode_(q, k, v, state, coefficients, scale, eps, log_decay)


def _slices(x: Tensor) -> Sequence[Tensor]:
    """x in slices of columns that the kernels take. A single slice is x itself: the gradient of a split is a copy."""
    return (x,) if x.shape[-1] <= MAX_VALUE_WIDTH else x.split(MAX_VALUE_WIDTH, dim=-1)


def _joined(slices: list[Tensor]) -> Tensor:
    return slices[0] if len(slices) == 1 else torch.cat(slices, dim=-1)


def _check(q: Tensor) -> None:
    if not (q.is_cuda or triton_interpreted()):
        raise ValueError(f"backend 'triton' needs CUDA tensors; these are on {q.device} (use 'auto' or 'chunked')")
    if q.dtype not in _DTYPES:
        raise ValueError(f"backend 'triton' takes bfloat16, float16 and float32; got {q.dtype} (use 'chunked')")
    if q.shape[-1] > MAX_KEY_WIDTH:
        raise ValueError(f"backend 'triton' takes K up to {MAX_KEY_WIDTH}; got {q.shape[-1]} (use 'chunked')")


def _folded(coefficients: Coefficients, scale: float) -> Coefficients:
    """Coefficients of the bare q . k: the kernels have no scale."""
    c0, c1, c2 = coefficients
    return c0, c1 * scale, c2 * scale**2


def _forward(*inputs: Any) -> tuple[Tensor, ...]:
    """(o, kv and z at the end) of ForwardInputs. Under torch.compile by way of an operator; else the function is called
    directly, because torch's dispatch of an operator takes longer than the kernels of a short sequence."""
    if torch.compiler.is_compiling():
        return _public(ForwardOutputs(*poly_forward(*inputs)))
    if torch.is_grad_enabled() and any(x.requires_grad for x in inputs if isinstance(x, Tensor)):
        return _Attend.apply(*inputs)
    return _public(forward(ForwardInputs(*inputs)))


def _public(outputs: ForwardOutputs) -> tuple[Any, ...]:
    """The outputs that a caller gets (or their gradients): o, and kv and z at the end."""
    return outputs.o, outputs.kv_final, outputs.z_final


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor | None, ...]:
        outputs = forward(ForwardInputs(*inputs), True in ctx.needs_input_grad)
        _save(ctx, inputs, outputs)
        return _public(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return _differentiate(ctx, poly_backward if torch.is_grad_enabled() else _backward, *grads)


def _backward(*inputs: Any) -> Gradients:
    return backward(BackwardInputs(*inputs))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
    given, made = ForwardInputs(*inputs), ForwardOutputs(*output)  # type: ignore[arg-type]
    ctx.save_for_backward(
        given.q, given.k, given.v, made.o, made.o_lo, made.inverse, made.kv, made.z, given.cu_seqlens,
        given.kv_initial, given.z_initial, given.log_decay,
    )  # fmt: skip
    ctx.numbers = (given.c0, given.c1, given.c2, given.eps, given.want_final)
    ctx.set_materialize_grads(False)


def _differentiate(
    ctx: Any, run: Any, do: Tensor | None, d_kv: Tensor | None, d_z: Tensor | None
) -> tuple[Tensor | None, ...]:
    """The gradients of ForwardInputs."""
    q, k, v, o, *others, log_decay = ctx.saved_tensors  # in the order of BackwardInputs, but for the last
    do = torch.zeros_like(o) if do is None else do
    dq, dk, dv, *d_initial, dg = run(do, d_kv, d_z, q, k, v, o, *others, *ctx.numbers, log_decay)
    if others[-1] is None:  # there is no state before
        d_initial = [None, None]
    return dq, dk, dv, None, *d_initial, None, None, None, None, None, None if log_decay is None else dg


def _differentiate_operator(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    return _differentiate(ctx, poly_backward, *_public(ForwardOutputs(*grads)))  # type: ignore[arg-type]


def _no_double_backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
    raise RuntimeError("the Triton path of poly_attention has no double backward; call it with backend='reference'")


def _filled(like: Tensor, tensors: tuple[Tensor | None, ...]) -> tuple[Any, ...]:
    """The tensors, with an empty one for each None: an operator can return only tensors."""
    return tuple(like.new_empty(0, dtype=torch.float32) if x is None else x for x in tensors)


poly_decode = torch.library.custom_op("rebased::poly_decode", decode, mutates_args=())


@poly_decode.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, kv: Tensor, z: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    return v.new_empty(v.shape), kv.new_empty(kv.shape), z.new_empty(z.shape)


@torch.library.custom_op("rebased::poly_decode_", mutates_args=("kv", "z"))
def poly_decode_(
    q: Tensor, k: Tensor, v: Tensor, kv: Tensor, z: Tensor, c0: float, c1: float, c2: float, scale: float, eps: float,
    log_decay: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """o of one token that follows the public state kv, z, which is overwritten."""
    return decode_(q, k, v, PolyState(kv, z), (c0, c1, c2), scale, eps, log_decay)


@poly_decode_.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, kv: Tensor, z: Tensor, *others: Any) -> Tensor:
    return v.new_empty(v.shape)


@torch.library.custom_op("rebased::poly_forward", mutates_args=())
def poly_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    kv_initial: Tensor | None,
    z_initial: Tensor | None,
    c0: float,
    c1: float,
    c2: float,
    eps: float,
    want_final: bool,
    log_decay: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """ForwardOutputs of ForwardInputs, as an operator: an empty tensor where there is none."""
    inputs = ForwardInputs(q, k, v, cu_seqlens, kv_initial, z_initial, c0, c1, c2, eps, want_final, log_decay)
    return _filled(q, forward(inputs))


@poly_forward.register_fake
def _(*inputs: Any) -> tuple[Tensor, ...]:
    q, _, v, cu_seqlens, kv_initial, _, c0, c1, _, _, want_final, _ = ForwardInputs(*inputs)
    call = prepare(q, v, cu_seqlens, c0 != 0 or c1 != 0, kv_initial is not None or want_final)
    o_lo = v.new_empty(call.o_lo_shape) if keeps_o_lo(v) else None
    inverse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
    kv = z = kv_final = z_final = None
    if call.plan.chunk is not None:
        kv_shape, z_shape = call.state_shapes(call.count(call.chunk).total)
        kv, z = q.new_empty(kv_shape, dtype=product_dtype(q)), q.new_empty(z_shape, dtype=torch.float32)
    if want_final:
        kv_final, z_final = (q.new_empty(s, dtype=torch.float32) for s in call.state_shapes(call.sequences))
    return _filled(q, ForwardOutputs(v.new_empty(v.shape), o_lo, inverse, kv, z, kv_final, z_final))


@torch.library.custom_op("rebased::poly_backward", mutates_args=())
def poly_backward(
    do: Tensor,
    d_kv: Tensor | None,
    d_z: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    o_lo: Tensor | None,
    inverse: Tensor,
    kv: Tensor | None,
    z: Tensor | None,
    cu_seqlens: Tensor | None,
    kv_initial: Tensor | None,
    z_initial: Tensor | None,
    c0: float,
    c1: float,
    c2: float,
    eps: float,
    want_final: bool,
    log_decay: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of BackwardInputs, as an operator: an empty tensor where there is none."""
    inputs = BackwardInputs(
        do, d_kv, d_z, q, k, v, o, o_lo, inverse, kv, z, cu_seqlens, kv_initial, z_initial, c0, c1, c2, eps, want_final,
        log_decay,
    )  # fmt: skip
    return _filled(q, backward(inputs))


@poly_backward.register_fake
def _(*inputs: Any) -> tuple[Tensor, ...]:
    given = BackwardInputs(*inputs)
    q, low = given.q, given.c0 != 0 or given.c1 != 0
    has_initial = given.kv_initial is not None
    call = prepare(q, given.v, given.cu_seqlens, low, has_initial or given.want_final)
    d_kv = d_z = None
    if has_initial:
        d_kv, d_z = (q.new_empty(s, dtype=torch.float32) for s in call.state_shapes(call.sequences))
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, given.k, given.v))
    g = given.log_decay
    dg = None if g is None else torch.empty_like(g, memory_format=torch.contiguous_format)
    return _filled(q, Gradients(dq, dk, dv, d_kv, d_z, dg))


poly_forward.register_autograd(_differentiate_operator, setup_context=_save)
poly_backward.register_autograd(_no_double_backward)
