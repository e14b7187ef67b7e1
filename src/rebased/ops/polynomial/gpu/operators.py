"""Polynomial attention on a GPU as torch sees it: gradients, and operators that torch.compile takes as they are."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rebased.ops.backend import triton_interpreted
from rebased.ops.polynomial.gpu.launch import backward, decode, forward, keeps_rest, kept, prepare
from rebased.ops.polynomial.gpu.layout import canonical, tiled
from rebased.ops.polynomial.gpu.plan import MAX_KEY_WIDTH, MAX_VALUE_WIDTH
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
) -> Tensor:
    _check(q, v)
    folded = _folded(coefficients, scale)
    return _joined([_forward(q, k, part, cu_seqlens, None, None, *folded, eps, False)[0] for part in _slices(v)])


def extend(
    q: Tensor, k: Tensor, v: Tensor, state: PolyState, *, coefficients: Coefficients, scale: float, eps: float
) -> tuple[Tensor, PolyState]:
    _check(q, v)
    if q.shape[1] == 1 and not (torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, *state))):
        run = poly_decode if torch.compiler.is_compiling() else decode
        o, kv, z = run(q, k, v, *state, *coefficients, scale, eps)
        return o, PolyState(kv, z)
    folded = _folded(coefficients, scale)
    K = q.shape[-1]
    outputs, states, z = [], [], state.z
    for part, kv in zip(_slices(v), _slices(state.kv), strict=True):
        before = tiled(PolyState(kv, state.z), K, coefficients)
        o, *after = _forward(q, k, part, None, *before, *folded, eps, True)
        kv, z = canonical(PolyState(*after), part.shape[-1], K, coefficients)
        outputs.append(o)
        states.append(kv)
    return _joined(outputs), PolyState(_joined(states), z)


def _slices(x: Tensor) -> Sequence[Tensor]:
    """Columns in widths that the kernels take. One slice is x itself: the gradient of a split is a copy."""
    return (x,) if x.shape[-1] <= MAX_VALUE_WIDTH else x.split(MAX_VALUE_WIDTH, dim=-1)


def _joined(slices: list[Tensor]) -> Tensor:
    return slices[0] if len(slices) == 1 else torch.cat(slices, dim=-1)


def _check(q: Tensor, v: Tensor) -> None:
    if not (q.is_cuda or triton_interpreted()):
        raise ValueError(f"backend 'triton' needs CUDA tensors; these are on {q.device} (use 'auto' or 'chunked')")
    if q.dtype not in _DTYPES:
        raise ValueError(f"backend 'triton' takes bfloat16, float16 and float32; got {q.dtype} (use 'chunked')")
    if q.shape[-1] > MAX_KEY_WIDTH:
        raise ValueError(f"backend 'triton' takes K up to {MAX_KEY_WIDTH}; got {q.shape[-1]} (use 'chunked')")


def _folded(coefficients: Coefficients, scale: float) -> Coefficients:
    """Coefficients of the bare q . k: the kernels know no scale."""
    c0, c1, c2 = coefficients
    return c0, c1 * scale, c2 * scale**2


def _forward(*args: Any) -> tuple[Tensor, ...]:
    """(o, kv and z at the end). Under torch.compile an operator; else the function itself: an operator's way through
    torch takes longer than the kernels of a short sequence."""
    return _handed_out(poly_forward(*args)) if torch.compiler.is_compiling() else _Attend.apply(*args)


def _handed_out(output: Sequence[Any]) -> tuple[Any, ...]:
    """Of what the forward pass makes, or of its gradients: those of the output and of the state at the end."""
    o, _, _, _, _, kv, z = output
    return o, kv, z


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor | None, ...]:
        output = forward(*inputs)
        _save(ctx, inputs, output)
        return _handed_out(output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return _differentiate(ctx, poly_backward if torch.is_grad_enabled() else backward, *grads)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
    q, k, v, cu_seqlens, kv_initial, _, c0, c1, c2, _, want_final = inputs
    o, o_rest, inverse, kv, z, _, _ = output
    ctx.save_for_backward(q, k, v, o, o_rest, inverse, kv, z, cu_seqlens)
    ctx.ends, ctx.coefficients = (kv_initial is not None, want_final), (c0, c1, c2)
    ctx.set_materialize_grads(False)


def _differentiate(
    ctx: Any, run: Any, do: Tensor | None, d_kv: Tensor | None, d_z: Tensor | None
) -> tuple[Tensor | None, ...]:
    *saved, cu_seqlens = ctx.saved_tensors
    do = torch.zeros_like(saved[3]) if do is None else do
    dq, dk, dv, *d_initial = run(do, d_kv, d_z, *saved, cu_seqlens, *ctx.ends, *ctx.coefficients)
    return dq, dk, dv, None, *(d_initial if ctx.ends[0] else (None, None)), None, None, None, None, None


def _differentiate_operator(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    return _differentiate(ctx, poly_backward, *_handed_out(grads))


def _no_double_backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
    raise RuntimeError("the Triton path of poly_attention has no double backward; call it with backend='reference'")


def _filled(like: Tensor, states: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    """An operator returns tensors: an empty one where there is nothing."""
    return tuple(like.new_empty(0, dtype=torch.float32) if x is None else x for x in states)


poly_decode = torch.library.custom_op("rebased::poly_decode", decode, mutates_args=())


@poly_decode.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, kv: Tensor, z: Tensor, *numbers: float) -> tuple[Tensor, Tensor, Tensor]:
    return v.new_empty(v.shape), kv.new_empty(kv.shape), z.new_empty(z.shape)


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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    o, o_rest, inverse, *states = forward(q, k, v, cu_seqlens, kv_initial, z_initial, c0, c1, c2, eps, want_final)
    return o, *_filled(q, (o_rest, inverse, *states))  # type: ignore[return-value]


@poly_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    kv_initial, _, c0, c1, _, _, want_final = rest
    o, o_rest = v.new_empty(v.shape), None
    inverse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
    call = prepare(q, v, cu_seqlens, c0, c1, kv_initial is not None or want_final)
    if keeps_rest(v):
        o_rest = v.new_empty(call.rest_shape)
    kv = z = kv_final = z_final = None
    if call.plan.chunk is not None:
        kv_shape, z_shape = call.state_shapes(call.blocks(call.chunk).total)
        kv, z = q.new_empty(kv_shape, dtype=kept(q)), q.new_empty(z_shape, dtype=torch.float32)
    if want_final:
        kv_final, z_final = (q.new_empty(s, dtype=torch.float32) for s in call.state_shapes(call.sequences))
    return o, *_filled(q, (o_rest, inverse, kv, z, kv_final, z_final))


@torch.library.custom_op("rebased::poly_backward", mutates_args=())
def poly_backward(
    do: Tensor,
    d_kv: Tensor | None,
    d_z: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    o_rest: Tensor | None,
    inverse: Tensor,
    kv: Tensor | None,
    z: Tensor | None,
    cu_seqlens: Tensor | None,
    has_initial: bool,
    has_final: bool,
    c0: float,
    c1: float,
    c2: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    ends, coefficients = (has_initial, has_final), (c0, c1, c2)
    saved = (q, k, v, o, o_rest, inverse, kv, z, cu_seqlens)
    dq, dk, dv, *d_initial = backward(do, d_kv, d_z, *saved, *ends, *coefficients)
    return dq, dk, dv, *_filled(q, tuple(d_initial))  # type: ignore[return-value]


@poly_backward.register_fake
def _(*inputs: Any) -> tuple[Tensor, ...]:
    _, _, _, q, k, v, _, _, _, _, _, cu_seqlens, has_initial, has_final, c0, c1, _ = inputs
    call = prepare(q, v, cu_seqlens, c0, c1, has_initial or has_final)
    d_kv = d_z = None
    if has_initial:
        d_kv, d_z = (q.new_empty(s, dtype=torch.float32) for s in call.state_shapes(call.sequences))
    grads = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    return *grads, *_filled(q, (d_kv, d_z))


poly_forward.register_autograd(_differentiate_operator, setup_context=_save)
poly_backward.register_autograd(_no_double_backward)
