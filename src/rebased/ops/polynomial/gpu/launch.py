"""Launches the kernels: forward, backward and decode as plain functions, without autograd.

For each kernel and Call a Launch is kept that needs only tensors: see call.py.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rebased.ops.kernel_launch import Launch, compile_together, launch
from rebased.ops.polynomial.gpu import check, in_torch
from rebased.ops.polynomial.gpu.backward import key_grad_kernel, query_grad_kernel
from rebased.ops.polynomial.gpu.call import (
    NO_DOCUMENTS,
    Call,
    Documents,
    Strides,
    choose_products,
    keeps_o_lo,
    prepare,
    product_dtype,
    rows_of,
    take_safe_tiles,
)
from rebased.ops.polynomial.gpu.decode import decode_kernel
from rebased.ops.polynomial.gpu.forward import forward_kernel
from rebased.ops.polynomial.gpu.gate import decay_grad_kernel, decays_kernel
from rebased.ops.polynomial.gpu.layout import monomials
from rebased.ops.polynomial.gpu.plan import FEATURE_TILE, padded
from rebased.ops.polynomial.gpu.states import chunk_sums_kernel, running_totals_kernel
from rebased.ops.polynomial.state import Coefficients, PolyState
from rebased.ops.self_check import checked

DECODE = {"BF": 32, "STAGES": 3, "num_warps": 1}  # BF: features that a program reads at a time
DECAYS = {"TILES": 16, "num_warps": 4}  # TILES: tiles that a program sums up at a time, if there are no chunks
TOTALS = {"SPAN": 256, "STAGES": 8, "num_warps": 2}  # SPAN: numbers of a state that a program takes


class ForwardInputs(NamedTuple):
    """What the forward pass reads, in the order of the operator poly_forward; states are tiled (layout.py)."""

    q: Tensor  # [B, T, H, K]
    k: Tensor  # [B, T, H, K]
    v: Tensor  # [B, T, H, V]
    cu_seqlens: Tensor | None  # [N+1]
    kv_initial: Tensor | None
    z_initial: Tensor | None
    c0: float  # coefficients of the bare q . k
    c1: float
    c2: float
    eps: float
    want_final: bool
    log_decay: Tensor | None = None  # [B, T, H]


class ForwardOutputs(NamedTuple):
    """What the forward pass makes, in the order of the operator poly_forward; states are tiled."""

    o: Tensor  # [B, T, H, V]
    o_lo: Tensor | None  # the rounding errors of the first rows of o
    inverse: Tensor  # [B, H, T]: 1 / (denominator + eps)
    kv: Tensor | None  # before each chunk
    z: Tensor | None
    kv_final: Tensor | None  # after the last token
    z_final: Tensor | None


class BackwardInputs(NamedTuple):
    """What the backward pass reads, in the order of the operator poly_backward."""

    do: Tensor
    d_kv: Tensor | None  # gradient of kv_final
    d_z: Tensor | None
    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    o_lo: Tensor | None
    inverse: Tensor
    kv: Tensor | None
    z: Tensor | None
    cu_seqlens: Tensor | None
    kv_initial: Tensor | None
    z_initial: Tensor | None
    c0: float
    c1: float
    c2: float
    eps: float
    want_final: bool
    log_decay: Tensor | None = None


class Gradients(NamedTuple):
    """What the backward pass makes, in the order of the operator poly_backward."""

    q: Tensor
    k: Tensor
    v: Tensor
    kv_initial: Tensor | None
    z_initial: Tensor | None
    log_decay: Tensor | None = None


class States(NamedTuple):
    """Tiled states: before each chunk, and after all tokens."""

    kv: Tensor | None = None
    z: Tensor | None = None
    kv_final: Tensor | None = None
    z_final: Tensor | None = None


NO_STATES = States()


class Decays(NamedTuple):
    """What kernels read of a gate (gate.py); all None without one."""

    local: Tensor | None = None  # [B, H, T]
    local_lo: Tensor | None = None
    until: Tensor | None = None
    kept: Tensor | None = None
    base: Tensor | None = None
    ends: Tensor | None = None  # [chunks, H]


NO_DECAYS = Decays()


def _empty(*shape: int, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """An uninitialised tensor on the device of `like`, in its dtype unless given: whatever a kernel writes."""
    return torch.empty(shape, device=like.device, dtype=dtype or like.dtype)


def _like(x: Tensor) -> Tensor:
    """An uninitialised, contiguous tensor like x: half the host time of _empty."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _or_zeros(x: Tensor | None, shape: tuple[int, ...], like: Tensor) -> Tensor:
    return like.new_zeros(shape, dtype=torch.float32) if x is None else x.contiguous()


def _strides(*tensors: Tensor) -> Strides:
    return tuple([x.stride() for x in tensors])


def _numbers(strides: Strides) -> list[int]:
    return [number for stride in strides for number in stride[:3]]


@lru_cache(maxsize=1024)
def _sums_launch(call: Call, strides: Strides, weighted: bool, backward: bool, want_final: bool) -> Launch:
    tile = call.plan.tiles.grad_sums if weighted else call.plan.tiles.sums
    chunks, tiles = call.count(call.chunk), call.features["TILES"]
    group = min(tiles, call.plan.group)
    return Launch(
        chunk_sums_kernel, (chunks.total * call.H, -(-tiles // group)),
        *_numbers(strides), call.T, call.H, chunks.per_sequence,
        **call.constants(tile, strides[:1], strides[1:]), GROUP=group, CHUNK=call.chunk, BT=tile.step,
        WEIGHTED=weighted, HI_LO=call.plan.hi_lo, BACKWARD=backward, ALL=want_final,
    )  # fmt: skip


@lru_cache(maxsize=1024)
def _totals_launch(
    call: Call, coefficients: Coefficients, has_initial: bool, want_final: bool, backward: bool, gated: bool
) -> Launch:
    width = padded(call.V)
    return Launch(
        running_totals_kernel, (call.sequences * call.H * _spans(call),),
        *coefficients, call.H, call.count(call.chunk).per_sequence,
        K=call.K, VP=width, **call.features, HAS_INITIAL=has_initial, WANT_FINAL=want_final, BACKWARD=backward,
        PACKED=call.documents is not None, **TOTALS, GATED=gated,
    )  # fmt: skip


def _spans(call: Call) -> int:
    """The number of programs that share the running totals of one sequence and head."""
    tiles = call.features["TILES"]
    return tiles * FEATURE_TILE * padded(call.V) // TOTALS["SPAN"] + tiles


@lru_cache(maxsize=1024)
def _decays_launch(call: Call, strides: tuple[int, ...]) -> Launch:
    chunks, tiles = call.count(call.chunk), DECAYS["TILES"]
    if call.plan.chunk is not None:
        tiles = call.chunk // call.gate
    return Launch(
        decays_kernel, (chunks.total * call.H,),
        *strides, call.T, call.H, chunks.per_sequence, call.chunk,
        PACKED=call.documents is not None, GATE=call.gate, **(DECAYS | {"TILES": tiles}),
    )  # fmt: skip


@lru_cache(maxsize=1024)
def _decay_grad_launch(call: Call) -> Launch:
    chunks, spans = call.count(call.chunk), _spans(call)
    return Launch(
        decay_grad_kernel, (chunks.total * call.H,),
        call.T, call.H, chunks.per_sequence, call.chunk, spans,
        BT=call.plan.chunk or DECAYS["TILES"] * call.gate, SPANS=min(256, 1 << (spans - 1).bit_length()),
        HAS_STATES=call.plan.chunk is not None, PACKED=call.documents is not None, num_warps=DECAYS["num_warps"],
    )  # fmt: skip


def _decays(call: Call, log_decay: Tensor | None, exact: bool, chunks: Documents) -> Decays:
    """exact: with local_lo, which counts in fp32 alone."""
    if log_decay is None:
        return NO_DECAYS
    has_states = call.plan.chunk is not None
    local, local_lo, until, kept = (
        _empty(call.B, call.H, call.T, like=log_decay, dtype=torch.float32) if wanted else None
        for wanted in (True, exact, True, has_states)
    )
    base = _empty(call.B, call.H, call.T, like=log_decay, dtype=torch.float64)
    ends = _empty(call.count(call.chunk).total, call.H, like=log_decay, dtype=torch.float64)
    made = Decays(local, local_lo, until, kept, base, ends)
    _decays_launch(call, log_decay.stride())(log_decay, *made, *chunks)
    return made


@lru_cache(maxsize=1024)
def _forward_launch(
    call: Call, strides: Strides, coefficients: Coefficients, eps: float, has_initial: bool, gated: bool
) -> Launch:
    tile = call.plan.tiles.forward
    tiles, chunks = call.count(tile.rows), call.count(call.chunk)
    return Launch(
        forward_kernel, (tiles.total * call.H,),
        *_numbers(strides), call.T, call.H, tiles.per_sequence, chunks.per_sequence, call.chunk, *coefficients, eps,
        **call.constants(tile, strides[:2], strides[2:]), KP=padded(call.K), BM=tile.rows, BN=tile.step, LOW=call.low,
        HAS_STATES=call.plan.chunk is not None, HAS_INITIAL=has_initial, LO_LIKE_O=call.lo_like_o,
        GATE=call.gate if gated else 0, GATED=gated,
    )  # fmt: skip


@lru_cache(maxsize=1024)
def _query_grad_launch(
    call: Call, strides: Strides, coefficients: Coefficients, has_initial: bool, gated: bool
) -> Launch:
    tile = call.plan.tiles.query_grad
    tiles, chunks = call.count(tile.rows), call.count(call.chunk)
    return Launch(
        query_grad_kernel, (tiles.total * call.H,),
        *_numbers(strides), call.T, call.H, tiles.per_sequence, chunks.per_sequence, call.chunk, *coefficients,
        **call.constants(tile, strides[:2], strides[2:]), KP=padded(call.K), BM=tile.rows, BN=tile.step, LOW=call.low,
        HAS_STATES=call.plan.chunk is not None, HAS_INITIAL=has_initial, LO_LIKE_O=call.lo_like_o,
        GATE=call.gate if gated else 0, GATED=gated,
    )  # fmt: skip


@lru_cache(maxsize=1024)
def _key_grad_launch(call: Call, strides: Strides, coefficients: Coefficients, has_final: bool, gated: bool) -> Launch:
    tile = call.plan.tiles.key_grad
    tiles, chunks = call.count(tile.rows), call.count(call.chunk)
    return Launch(
        key_grad_kernel, (tiles.total * call.H,),
        *_numbers(strides), call.T, call.H, tiles.per_sequence, chunks.per_sequence, call.chunk, *coefficients,
        **call.constants(tile, strides[:2], strides[2:]), KP=padded(call.K), BM=tile.step, BN=tile.rows, LOW=call.low,
        HAS_STATES=call.plan.chunk is not None, HAS_FINAL=has_final, GATE=call.gate if gated else 0, GATED=gated,
    )  # fmt: skip


def _totals(
    call: Call,
    x: Tensor,
    y: Tensor,
    scalars: tuple[Tensor | None, Tensor | None],
    initial: PolyState | None,
    documents: Documents,
    coefficients: Coefficients,
    *,
    backward: bool,
    want_final: bool,
    gate: tuple[Tensor | None, ...],
) -> States:
    """The running totals of phi(x)^T [y, 1] over chunks; backward, from the last chunk to the first.

    gate: ends, kv_states, z_states and shares of running_totals_kernel, or four times None."""

    def empty(count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        kv, z = call.state_shapes(count)
        return _empty(*kv, like=x, dtype=dtype), _empty(*z, like=x, dtype=torch.float32)

    count = call.count(call.chunk).total
    totals = empty(count, product_dtype(x))
    sums = empty(count, torch.float32)
    final = empty(call.sequences, torch.float32) if want_final else (None, None)
    run = _sums_launch(call, _strides(x, y), scalars[0] is not None, backward, want_final)
    run(x, y, *scalars, *sums, *documents)
    run = _totals_launch(call, coefficients, initial is not None, want_final, backward, gate[0] is not None)
    run(*sums, *(initial or (None, None)), *totals, *final, documents.first, *gate)
    return States(*totals, *final)


@checked(in_torch.decode, compare=check.compare_decode)
def decode(
    q: Tensor, k: Tensor, v: Tensor, kv: Tensor, z: Tensor, c0: float, c1: float, c2: float, scale: float, eps: float,
    log_decay: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(o, kv, z) after one token: q, k [B, 1, H, K], v [B, 1, H, V]; a public state kv [B, H, F, V], z [B, H, F];
    log_decay [B, 1, H] or None."""
    kv, z = kv.contiguous(), z.contiguous()
    after = PolyState(_empty(*kv.shape, like=kv), _empty(*z.shape, like=z))
    return _decode(q, k, v, PolyState(kv, z), after, (c0, c1, c2), scale, eps, log_decay), *after


@checked(in_torch.decode_, compare=check.compare_decode_)
def decode_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: PolyState,
    c: Coefficients,
    scale: float,
    eps: float,
    log_decay: Tensor | None = None,
) -> Tensor:
    """o of `decode`. The state, whose tensors are contiguous, is overwritten by the one after the token."""
    return _decode(q, k, v, state, state, c, scale, eps, log_decay)


def _decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    before: PolyState,
    after: PolyState,
    coefficients: Coefficients,
    scale: float,
    eps: float,
    g: Tensor | None,
) -> Tensor:
    """o, with the state after the token written to `after`: each number is read by the program that writes it."""
    q, k, v = rows_of(q), rows_of(k), rows_of(v)
    B, _, H, K = q.shape
    first, second, weights = monomials(K, coefficients, scale, q.device)
    o = _empty(*v.shape, like=v)
    F, V = before.kv.shape[2:]
    launch(
        decode_kernel, (B * H,),
        q, k, v, *before, *after, o, first, second, weights, g,
        q.stride(0), q.stride(2), k.stride(0), k.stride(2), v.stride(0), v.stride(2),
        *((None, None) if g is None else (g.stride(0), g.stride(2))),
        H, eps,
        F=F, K=K, V=V, VP=padded(V), **DECODE, GATED=g is not None, overwrites=(*before,) if before is after else (),
    )  # fmt: skip
    return o


def _given(inputs: BackwardInputs) -> BackwardInputs:
    """All but buffers, which kernels need not fill."""
    return inputs._replace(o_lo=None, kv=None, z=None)


def _safer(inputs: Any, *_: Any) -> bool:
    """True if calls like this one take safe tiles from now on; False if they have."""
    return take_safe_tiles(choose_products(inputs.q), inputs.q.shape[3], inputs.v.shape[3])


@checked(lambda *args: ForwardOutputs(*in_torch.forward(*args)), compare=check.compare_forward, safer=_safer)
def forward(inputs: ForwardInputs, gradients: bool = False) -> ForwardOutputs:
    """The output, what the backward pass needs, and the state at the end.

    gradients: a backward pass will follow; its kernels are then compiled together with those of the forward pass.
    """
    q, k, v, cu_seqlens, kv_initial, z_initial, c0, c1, c2, eps, want_final, log_decay = inputs
    q, k, v, coefficients = rows_of(q), rows_of(k), rows_of(v), (c0, c1, c2)
    initial = None
    if kv_initial is not None and z_initial is not None:
        initial = PolyState(kv_initial.contiguous(), z_initial.contiguous())
    call = prepare(q, v, cu_seqlens, c0 != 0 or c1 != 0, initial is not None or want_final)
    if in_torch.BY_TORCH and call.sizes in in_torch.BY_TORCH:
        return ForwardOutputs(*in_torch.forward(inputs))
    gated = log_decay is not None
    run = _forward_launch(call, _strides(q, k, v), coefficients, eps, initial is not None, gated)
    if run.is_new and q.is_cuda:
        compile_together(lambda: plan_forward(inputs, gradients), q.device)
    chunks, states = NO_DOCUMENTS, NO_STATES
    if call.plan.chunk is not None or gated:
        chunks = call.find(cu_seqlens, call.chunk)
    decays = _decays(call, log_decay, q.dtype == torch.float32, chunks)
    if call.plan.chunk is not None:
        states = _totals(
            call, k, v, (decays.kept, None), initial, chunks, coefficients, backward=False, want_final=want_final,
            gate=(decays.ends, None, None, None),
        )  # fmt: skip
    o = _like(v)
    o_lo = _empty(*call.o_lo_shape, like=v) if keeps_o_lo(v) else None
    inverse = _empty(call.B, call.H, call.T, like=q, dtype=torch.float32)
    tiles = call.find(cu_seqlens, call.plan.tiles.forward.rows)
    run(
        q, k, v, o, o_lo, inverse, states.kv, states.z, *tiles, chunks.first,
        decays.local, decays.local_lo, decays.until, decays.base,
    )  # fmt: skip
    return ForwardOutputs(o, o_lo, inverse, *states)


@checked(
    lambda inputs: Gradients(*in_torch.backward(inputs)), compare=check.compare_backward, safer=_safer, inputs=_given
)
def backward(inputs: BackwardInputs) -> Gradients:
    """The gradients of q, k, v and of the state before the first token."""
    (
        do, d_kv, d_z, q, k, v, o, o_lo, inverse, kv, z, cu_seqlens, kv_initial, _, c0, c1, c2, _, want_final,
        log_decay,
    ) = inputs  # fmt: skip
    q, k, v, do, coefficients = rows_of(q), rows_of(k), rows_of(v), rows_of(do), (c0, c1, c2)
    has_initial = kv_initial is not None
    call = prepare(q, v, cu_seqlens, c0 != 0 or c1 != 0, has_initial or want_final)
    if in_torch.BY_TORCH and call.sizes in in_torch.BY_TORCH:
        return Gradients(*in_torch.backward(inputs))
    has_states, gated = call.plan.chunk is not None, log_decay is not None
    strides = _strides(q, k, v, do)
    run = _query_grad_launch(call, strides, coefficients, has_initial, gated)
    if run.is_new and q.is_cuda:
        compile_together(lambda: backward(_without_data(inputs)), q.device)
    dq, dk, dv, deltas = _like(q), _like(k), _like(v), _like(inverse)
    chunks = call.find(cu_seqlens if has_states or gated else None, call.chunk)
    decays = _decays(call, log_decay, q.dtype == torch.float32, chunks)
    row_sums = faded = faded_sums = column_sums = past_sums = shares = d_log_decay = None
    if log_decay is not None:
        row_sums, faded, column_sums = _like(inverse), _like(inverse), _like(inverse)
        d_log_decay = _like(log_decay)
        if has_states:
            faded_sums, past_sums = _like(inverse), _like(inverse)
            count = call.count(call.chunk).total
            shares = _empty(count, call.H, _spans(call), like=inverse)

    tiles = call.find(cu_seqlens, call.plan.tiles.query_grad.rows)
    before, o_lo = (kv, z) if has_states else (None, None), o_lo if keeps_o_lo(v) else None
    run(
        q, k, v, o, o_lo, do, inverse, dq, deltas, *before, *tiles, chunks.first,
        decays.local, decays.local_lo, decays.until, decays.base, row_sums, faded, faded_sums,
    )  # fmt: skip

    d_final, states = None, NO_STATES
    if has_states:
        if d_kv is not None or d_z is not None:
            kv_shape, z_shape = call.state_shapes(call.sequences)
            d_final = PolyState(_or_zeros(d_kv, kv_shape, q), _or_zeros(d_z, z_shape, q))
        states = _totals(
            call, q, do, (faded_sums if gated else inverse, deltas), d_final, chunks, coefficients, backward=True,
            want_final=has_initial, gate=(decays.ends, kv, z, shares) if gated else (None, None, None, None),
        )  # fmt: skip

    run = _key_grad_launch(call, strides, coefficients, d_final is not None, gated)
    tiles = call.find(cu_seqlens, call.plan.tiles.key_grad.rows)
    run(
        q, k, v, do, inverse, deltas, dk, dv, states.kv, states.z, *tiles, chunks.first,
        decays.local, decays.local_lo, decays.until, decays.base, decays.ends, faded, column_sums, past_sums,
    )  # fmt: skip
    if gated:
        _decay_grad_launch(call)(row_sums, column_sums, past_sums, shares, d_log_decay, *chunks)
    return Gradients(dq, dk, dv, states.kv_final, states.z_final, d_log_decay)


def _without_data(inputs: Any) -> Any:
    """ForwardInputs or BackwardInputs with tensors that have no data: their passes then only plan their launches."""
    return inputs._make(
        torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") if isinstance(x, Tensor) else x
        for x in inputs
    )


def plan_forward(inputs: ForwardInputs, gradients: bool) -> None:
    """Plans the launches of a forward pass, and of the backward pass that will probably follow."""
    given: ForwardInputs = _without_data(inputs)
    made = forward(given)
    if gradients:
        backward(
            BackwardInputs(
                made.o, made.kv_final, made.z_final, given.q, given.k, given.v, made.o, made.o_lo, made.inverse,
                made.kv, made.z, given.cu_seqlens, given.kv_initial, given.z_initial,
                given.c0, given.c1, given.c2, given.eps, given.want_final, given.log_decay,
            )
        )  # fmt: skip
