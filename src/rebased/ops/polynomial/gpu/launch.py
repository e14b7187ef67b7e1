"""Launches the kernels: forward, backward and decode as custom operators, each with a fake version."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rebased.ops.backend import triton_interpreted
from rebased.ops.polynomial.gpu.backward import key_grad_kernel, query_grad_kernel
from rebased.ops.polynomial.gpu.blocks import Blocks, cut
from rebased.ops.polynomial.gpu.decode import decode_kernel
from rebased.ops.polynomial.gpu.forward import forward_kernel
from rebased.ops.polynomial.gpu.layout import canonical, monomials, spread, tiled
from rebased.ops.polynomial.gpu.plan import (
    FEATURE_BLOCK,
    FEATURE_TILE,
    MAX_KEY_WIDTH,
    MAX_VALUE_WIDTH,
    STATE_EXTRA,
    Plan,
    feature_blocks,
    feature_tiles,
    make_plan,
    padded,
)
from rebased.ops.polynomial.gpu.states import chunk_sums_kernel, running_totals_kernel
from rebased.ops.polynomial.state import Coefficients, PolyState

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SPAN = 256  # numbers of a state that a program of the running totals takes


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
    c0, c1, c2 = _folded(coefficients, scale)
    outputs = [
        poly_forward(q, k, part, cu_seqlens, None, c0, c1, c2, eps, False)[0]
        for part in v.split(MAX_VALUE_WIDTH, dim=-1)
    ]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)


def extend(
    q: Tensor, k: Tensor, v: Tensor, state: PolyState, *, coefficients: Coefficients, scale: float, eps: float
) -> tuple[Tensor, PolyState]:
    _check(q, v)
    if q.shape[1] == 1 and not (torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, *state))):
        return _decode(q, k, v, state, coefficients, scale, eps)
    c0, c1, c2 = _folded(coefficients, scale)
    K = q.shape[-1]
    outputs, states, z = [], [], state.z
    for part, kv in zip(v.split(MAX_VALUE_WIDTH, -1), state.kv.split(MAX_VALUE_WIDTH, -1), strict=True):
        tiles = tiled(PolyState(kv, state.z), K, coefficients)
        o, _, _, after = poly_forward(q, k, part, None, tiles, c0, c1, c2, eps, True)
        kv, z = canonical(after, K, part.shape[-1], coefficients)
        outputs.append(o)
        states.append(kv)
    if len(outputs) == 1:
        return outputs[0], PolyState(states[0], z)
    return torch.cat(outputs, -1), PolyState(torch.cat(states, -1), z)


def _decode(
    q: Tensor, k: Tensor, v: Tensor, state: PolyState, coefficients: Coefficients, scale: float, eps: float
) -> tuple[Tensor, PolyState]:
    o, kv, z = poly_decode(q, k, v, state.kv, state.z, *coefficients, scale, eps)
    return o, PolyState(kv, z)


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


def _empty(*shape: int, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Whatever a kernel writes is made here, so that tests can poison it."""
    return torch.empty(shape, device=like.device, dtype=dtype or like.dtype)


@dataclass(frozen=True)
class Call:
    """What every launch of one call shares."""

    B: int
    T: int
    H: int
    K: int
    V: int
    low: bool
    plan: Plan
    precision: str
    cu_seqlens: Tensor | None
    chunks: Blocks

    @property
    def sequences(self) -> int:
        return self.B if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    @property
    def features(self) -> dict[str, int]:
        blocks = feature_blocks(self.K, self.low)
        return {"TILES": feature_tiles(self.K), "PAIRS": feature_blocks(self.K, False), "BLOCKS": blocks}

    @property
    def state_shape(self) -> tuple[int, int, int]:
        return self.H, self.features["BLOCKS"] * FEATURE_BLOCK, padded(self.V) + STATE_EXTRA

    @property
    def widths(self) -> dict[str, int]:
        return {"K": self.K, "KP": padded(self.K), "V": self.V, "VP": padded(self.V)}


def _call(q: Tensor, v: Tensor, cu_seqlens: Tensor | None, c0: float, c1: float, has_state: bool) -> Call:
    B, T, H, K = q.shape
    V, low = v.shape[-1], c0 != 0 or c1 != 0
    plan = make_plan(T, K, V, low=low, half=q.dtype == torch.bfloat16, has_state=has_state)
    if q.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest":
        precision = "tf32x3"  # three tensor core products make one fp32 product
    else:
        precision = "tf32"
    if cu_seqlens is not None:
        cu_seqlens = cu_seqlens.to(torch.int32)
    return Call(B, T, H, K, V, low, plan, precision, cu_seqlens, cut(B, T, plan.chunk or T, cu_seqlens))


def _rows(x: Tensor) -> Tensor:
    """The kernels read a row of a head as neighbours in memory; any other stride is free."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for x in tensors for stride in x.stride()[:3]]


def _wide(*tensors: Tensor) -> bool:
    """Whether an offset inside one batch row may not fit into 32 bits."""
    return any(x.shape[1] * abs(x.stride(1)) >= 2**31 for x in tensors)


def _totals(
    call: Call,
    x: Tensor,
    y: Tensor,
    scalars: tuple[Tensor, Tensor] | None,
    initial: Tensor | None,
    coefficients: Coefficients,
    backward: bool,
    want_final: bool,
) -> tuple[Tensor, Tensor]:
    """Sums over chunks of phi(x)^T [y, 1], then their running totals over chunks: (totals, final)."""
    blocks, count, packed = call.features["BLOCKS"], call.chunks.count, call.cu_seqlens is not None
    H, F, W = call.state_shape
    sums = _empty(count, H, F, W, like=x, dtype=torch.float32)
    group = blocks if call.K <= 2 * FEATURE_TILE else 2
    scale, weight = scalars or (None, None)
    tile = call.plan.sums
    chunk_sums_kernel[(count * H, -(-blocks // group))](
        x, y, scale, weight, sums,
        call.cu_seqlens, call.chunks.first, call.chunks.owner,
        *_strides(x, y),
        call.T, H, call.chunks.per_sequence,
        K=call.K, V=call.V, VP=padded(call.V), **call.features, GROUP=group, CHUNK=call.plan.chunk, BT=tile.step,
        WEIGHTED=scalars is not None, PACKED=packed, WIDE=_wide(x, y), PRECISION=call.precision, **tile.options,
    )  # fmt: skip
    totals = _empty(count, H, F, W, like=x, dtype=torch.bfloat16 if x.dtype == torch.bfloat16 else torch.float32)
    final = _empty(call.sequences if want_final else 0, H, F, W, like=x, dtype=torch.float32)
    c0, c1, c2 = coefficients
    running_totals_kernel[(call.sequences * H, F * W // SPAN)](
        sums, initial, totals, final,
        call.chunks.first,
        c0, c1, c2,
        H, call.chunks.per_sequence,
        K=call.K, W=W, **call.features,
        HAS_INITIAL=initial is not None, WANT_FINAL=want_final, BACKWARD=backward, PACKED=packed,
        SPAN=SPAN, STAGES=4, num_warps=2,
    )  # fmt: skip
    return totals, final


@torch.library.custom_op("rebased::poly_decode", mutates_args=())
def poly_decode(
    q: Tensor, k: Tensor, v: Tensor, kv: Tensor, z: Tensor, c0: float, c1: float, c2: float, scale: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(o, kv, z) after one token; the state is the public one."""
    q, k, v, kv, z = _rows(q), _rows(k), _rows(v), kv.contiguous(), z.contiguous()
    B, _, H, K = q.shape
    first, second, weights = monomials(K, (c0, c1, c2), scale, q.device)
    o = _empty(*v.shape, like=v)
    kv_after, z_after = _empty(*kv.shape, like=kv), _empty(*z.shape, like=z)
    F, V = kv.shape[2:]
    decode_kernel[(B * H,)](
        q, k, v, kv, z, kv_after, z_after, o, first, second, weights,
        q.stride(0), q.stride(2), k.stride(0), k.stride(2), v.stride(0), v.stride(2),
        H, eps,
        F=F, K=K, V=V, VP=padded(V), BF=32, num_warps=4,
    )  # fmt: skip
    return o, kv_after, z_after


@poly_decode.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, kv: Tensor, z: Tensor, c0: float, c1: float, c2: float, scale: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    return v.new_empty(v.shape), kv.new_empty(kv.shape), z.new_empty(z.shape)


@torch.library.custom_op("rebased::poly_forward", mutates_args=())
def poly_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    initial: Tensor | None,
    c0: float,
    c1: float,
    c2: float,
    eps: float,
    want_final: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(o, 1 / denominator, states before each chunk, state after all tokens); states are tiled."""
    q, k, v = _rows(q), _rows(k), _rows(v)
    call = _call(q, v, cu_seqlens, c0, c1, initial is not None or want_final)
    if call.plan.chunk is None:
        states, final = (_empty(0, like=q, dtype=torch.float32) for _ in range(2))
    else:
        initial = spread(initial)
        states, final = _totals(call, k, v, None, initial, (c0, c1, c2), backward=False, want_final=want_final)
    o = _empty(*v.shape, like=v)
    inverse = _empty(call.B, call.H, call.T, like=q, dtype=torch.float32)
    tile = call.plan.forward
    blocks = cut(call.B, call.T, tile.rows, call.cu_seqlens)
    forward_kernel[(blocks.count * call.H,)](
        q, k, v, o, inverse, states,
        call.cu_seqlens, blocks.first, blocks.owner, call.chunks.first,
        *_strides(q, k, v),
        call.T, call.H, blocks.per_sequence, call.chunks.per_sequence, call.plan.chunk or call.T,
        c0, c1, c2, eps,
        **call.widths, **call.features, BM=tile.rows, BN=tile.step,
        LOW=call.low, HAS_STATES=call.plan.chunk is not None, HAS_INITIAL=initial is not None,
        PACKED=cu_seqlens is not None, WIDE=_wide(q, k, v, o), PRECISION=call.precision, **tile.options,
    )  # fmt: skip
    return o, inverse, states, final


@poly_forward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    initial: Tensor | None,
    c0: float,
    c1: float,
    c2: float,
    eps: float,
    want_final: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    o = v.new_empty(v.shape)
    inverse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
    call = _call(q, v, cu_seqlens, c0, c1, initial is not None or want_final)
    if call.plan.chunk is None:
        return o, inverse, q.new_empty(0, dtype=torch.float32), q.new_empty(0, dtype=torch.float32)
    kept = torch.bfloat16 if q.dtype == torch.bfloat16 else torch.float32
    states = q.new_empty((call.chunks.count, *call.state_shape), dtype=kept)
    final = q.new_empty((call.sequences if want_final else 0, *call.state_shape), dtype=torch.float32)
    return o, inverse, states, final


@torch.library.custom_op("rebased::poly_backward", mutates_args=())
def poly_backward(
    do: Tensor,
    d_final: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    inverse: Tensor,
    states: Tensor,
    cu_seqlens: Tensor | None,
    has_initial: bool,
    has_final: bool,
    c0: float,
    c1: float,
    c2: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, gradient of the initial state)."""
    q, k, v, do = _rows(q), _rows(k), _rows(v), _rows(do)
    call = _call(q, v, cu_seqlens, c0, c1, has_initial or has_final)
    has_states = call.plan.chunk is not None
    dq = _empty(*q.shape, like=q)
    dk, dv = _empty(*k.shape, like=k), _empty(*v.shape, like=v)
    deltas = _empty(call.B, call.H, call.T, like=q, dtype=torch.float32)
    common: dict[str, Any] = {
        **call.widths, **call.features, "LOW": call.low, "HAS_STATES": has_states, "PACKED": cu_seqlens is not None,
        "WIDE": _wide(q, k, v, o, do), "PRECISION": call.precision,
    }  # fmt: skip

    def where(blocks: Blocks) -> tuple[Any, ...]:
        return (
            call.cu_seqlens, blocks.first, blocks.owner, call.chunks.first,
            *_strides(q, k, v, do),
            call.T, call.H, blocks.per_sequence, call.chunks.per_sequence, call.plan.chunk or call.T,
            c0, c1, c2,
        )  # fmt: skip

    tile = call.plan.query_grad
    blocks = cut(call.B, call.T, tile.rows, call.cu_seqlens)
    query_grad_kernel[(blocks.count * call.H,)](
        q, k, v, o, do, inverse, dq, deltas, states, *where(blocks),
        BM=tile.rows, BN=tile.step, HAS_INITIAL=has_initial, **common, **tile.options,
    )  # fmt: skip
    if has_states:
        grads, d_initial = _totals(
            call, q, do, (inverse, deltas), spread(d_final), (c0, c1, c2), backward=True, want_final=has_initial
        )
        d_initial[..., padded(call.V) + 1 :] = 0  # copies of z: the one in the first column counts
    else:
        grads, d_initial = states, _empty(0, like=q, dtype=torch.float32)
    tile = call.plan.key_grad
    blocks = cut(call.B, call.T, tile.rows, call.cu_seqlens)
    key_grad_kernel[(blocks.count * call.H,)](
        q, k, v, do, inverse, deltas, dk, dv, grads, *where(blocks),
        BM=tile.step, BN=tile.rows, **common, **tile.options,
    )  # fmt: skip
    return dq, dk, dv, d_initial


@poly_backward.register_fake
def _(
    do: Tensor,
    d_final: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    inverse: Tensor,
    states: Tensor,
    cu_seqlens: Tensor | None,
    has_initial: bool,
    has_final: bool,
    c0: float,
    c1: float,
    c2: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    call = _call(q, v, cu_seqlens, c0, c1, has_initial or has_final)
    has_states = call.plan.chunk is not None
    shape = (call.sequences if has_initial else 0, *call.state_shape) if has_states else (0,)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), q.new_empty(shape, dtype=torch.float32)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, cu_seqlens, initial, c0, c1, c2, _, want_final = inputs
    o, inverse, states, _ = output
    ctx.save_for_backward(q, k, v, o, inverse, states, cu_seqlens)
    ctx.ends, ctx.coefficients = (initial is not None, want_final), (c0, c1, c2)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, do: Tensor | None, *rest: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, o, inverse, states, cu_seqlens = ctx.saved_tensors
    do = torch.zeros_like(o) if do is None else do
    dq, dk, dv, d_initial = poly_backward(
        do, rest[2], q, k, v, o, inverse, states, cu_seqlens, *ctx.ends, *ctx.coefficients
    )
    return dq, dk, dv, None, d_initial if ctx.ends[0] else None, None, None, None, None, None


def _no_double_backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
    raise RuntimeError("the Triton path of poly_attention has no double backward; call it with backend='reference'")


poly_forward.register_autograd(_differentiate, setup_context=_save)
poly_backward.register_autograd(_no_double_backward)
