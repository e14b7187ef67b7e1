"""Launches the kernels: forward, backward and decode as plain functions, which know nothing of autograd."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from rebased.ops.kernel_launch import launch
from rebased.ops.polynomial.gpu.backward import key_grad_kernel, query_grad_kernel
from rebased.ops.polynomial.gpu.blocks import Blocks, cut
from rebased.ops.polynomial.gpu.decode import decode_kernel
from rebased.ops.polynomial.gpu.forward import EARLY, forward_kernel
from rebased.ops.polynomial.gpu.layout import monomials
from rebased.ops.polynomial.gpu.plan import (
    FEATURE_BLOCK,
    Plan,
    Products,
    Tile,
    feature_blocks,
    feature_tiles,
    make_plan,
    padded,
)
from rebased.ops.polynomial.gpu.states import chunk_sums_kernel, running_totals_kernel
from rebased.ops.polynomial.state import Coefficients

DECODE = {"BF": 32, "STAGES": 3, "num_warps": 1}
TOTALS = {"SPAN": 256, "STAGES": 8, "num_warps": 2}  # SPAN: numbers of a state that a program takes


States = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]  # kv and z before each chunk, and at the end
NO_STATES: States = (None, None, None, None)


def kept(q: Tensor) -> torch.dtype:
    """The precision in which products read states."""
    return torch.bfloat16 if q.dtype == torch.bfloat16 else torch.float32


def keeps_rest(v: Tensor) -> bool:
    """Whether outputs are rounded, and what the first lose is kept for the backward pass."""
    return v.dtype != torch.float32


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
    products: Products
    cu_seqlens: Tensor | None
    chunks: Blocks

    @property
    def sequences(self) -> int:
        return self.B if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    @property
    def precision(self) -> str:
        """Of products that are not in bf16."""
        return "tf32x3" if self.products == "tf32x3" else "tf32"

    @cached_property
    def features(self) -> dict[str, int]:
        blocks = feature_blocks(self.K, self.low)
        return {"TILES": feature_tiles(self.K), "PAIRS": feature_blocks(self.K, False), "BLOCKS": blocks}

    def state_shapes(self, count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of kv and z."""
        z = (count, self.H, self.features["BLOCKS"] * FEATURE_BLOCK)
        return (*z, padded(self.V)), z

    @property
    def rest_like_o(self) -> bool:
        """Whether sequences are so short that o_rest needs no more room in the shape of o."""
        return self.sequences * EARLY.value >= self.B * self.T

    @property
    def rest_shape(self) -> tuple[int, ...]:
        if self.rest_like_o:
            return (self.B, self.T, self.H, self.V)
        return (self.sequences, self.H, EARLY.value, self.V)

    def is_even(self, tile: Tile) -> bool:
        """Whether tiles are all full."""
        return self.cu_seqlens is None and self.T % max(tile.rows, tile.step) == 0

    @cached_property
    def widths(self) -> dict[str, int]:
        return {"K": self.K, "KP": padded(self.K), "V": self.V, "VP": padded(self.V)}


def prepare(q: Tensor, v: Tensor, cu_seqlens: Tensor | None, c0: float, c1: float, has_state: bool) -> Call:
    products: Products = "tf32"
    if q.dtype == torch.bfloat16:
        products = "bf16"
    elif q.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest":
        products = "tf32x3"
    sizes = (*q.shape, v.shape[-1])
    make = _call if all(type(size) is int for size in sizes) else _call.__wrapped__  # symbols cannot be looked up
    call = make(make_plan, *sizes, c0 != 0 or c1 != 0, products, has_state)
    if cu_seqlens is None:
        return call
    cu_seqlens = cu_seqlens.to(torch.int32)
    return replace(call, cu_seqlens=cu_seqlens, chunks=cut(call.B, call.T, call.plan.chunk or call.T, cu_seqlens))


@lru_cache(maxsize=1024)
def _call(
    planner: Callable[..., Plan], B: int, T: int, H: int, K: int, V: int, low: bool, products: Products, has_state: bool
) -> Call:
    plan = planner(T, K, V, low=low, products=products, has_state=has_state)
    return Call(B, T, H, K, V, low, plan, products, None, cut(B, T, plan.chunk or T, None))


def _or_zeros(x: Tensor | None, shape: tuple[int, ...], like: Tensor) -> Tensor:
    return like.new_zeros(shape, dtype=torch.float32) if x is None else x.contiguous()


def _rows(x: Tensor) -> Tensor:
    """The kernels read a row of a head as neighbours in memory; any other stride is free."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for x in tensors for stride in x.stride()[:3]]


def _wide(call: Call, strides: Sequence[int]) -> bool:
    """Whether an offset inside one batch row, of inputs or of what the kernels write, may not fit into 32 bits."""
    return call.T * max(call.H * max(call.K, call.V), *map(abs, strides[1::3])) >= 2**31


def _totals(
    call: Call,
    x: Tensor,
    y: Tensor,
    scalars: tuple[Tensor, Tensor] | None,
    initial: tuple[Tensor, Tensor] | None,
    coefficients: Coefficients,
    backward: bool,
    want_final: bool,
) -> States:
    """(kv, z) before each chunk and (kv, z) after all tokens, of phi(x)^T [y, 1]; backward, time is turned round."""
    chunks, packed = call.chunks, call.cu_seqlens is not None
    blocks, tile = call.features["BLOCKS"], call.plan.sums
    if backward and call.plan.grad_sums is not None:
        tile = call.plan.grad_sums

    def empty(count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        kv, z = call.state_shapes(count)
        return _empty(*kv, like=x, dtype=dtype), _empty(*z, like=x, dtype=torch.float32)

    totals = empty(chunks.count, kept(x))
    sums = empty(chunks.count, torch.float32)
    final = empty(call.sequences, torch.float32) if want_final else (None, None)
    group, strides = min(blocks, call.plan.group), _strides(x, y)
    launch(
        chunk_sums_kernel, (chunks.count * call.H, -(-blocks // group)),
        x, y, *(scalars or (None, None)), *sums,
        call.cu_seqlens, chunks.first, chunks.owner,
        *strides,
        call.T, call.H, chunks.per_sequence,
        K=call.K, V=call.V, VP=padded(call.V), **call.features, GROUP=group,
        CHUNK=call.plan.chunk, BT=tile.step,
        WEIGHTED=scalars is not None, BACKWARD=backward, ALL=want_final, PACKED=packed, EVEN=call.is_even(tile),
        WIDE=_wide(call, strides), PRECISION=call.precision, **tile.options,
    )  # fmt: skip
    kv_numbers = blocks * FEATURE_BLOCK * padded(call.V)
    launch(
        running_totals_kernel, (call.sequences * call.H * (kv_numbers // TOTALS["SPAN"] + blocks),),
        *sums, *(initial or (None, None)), *totals, *final,
        chunks.first,
        *coefficients,
        call.H, chunks.per_sequence,
        K=call.K, VP=padded(call.V), **call.features,
        HAS_INITIAL=initial is not None, WANT_FINAL=want_final, BACKWARD=backward, PACKED=packed,
        **TOTALS,
    )  # fmt: skip
    return *totals, *final


def decode(
    q: Tensor, k: Tensor, v: Tensor, kv: Tensor, z: Tensor, c0: float, c1: float, c2: float, scale: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(o, kv, z) after one token; the state is the public one."""
    q, k, v, kv, z = _rows(q), _rows(k), _rows(v), kv.contiguous(), z.contiguous()
    B, _, H, K = q.shape
    first, second, weights = monomials(K, (c0, c1, c2), scale, q.device)
    o = _empty(*v.shape, like=v)
    kv_after, z_after = _empty(*kv.shape, like=kv), _empty(*z.shape, like=z)
    F, V = kv.shape[2:]
    launch(
        decode_kernel, (B * H,),
        q, k, v, kv, z, kv_after, z_after, o, first, second, weights,
        q.stride(0), q.stride(2), k.stride(0), k.stride(2), v.stride(0), v.stride(2),
        H, eps,
        F=F, K=K, V=V, VP=padded(V), **DECODE,
    )  # fmt: skip
    return o, kv_after, z_after


def forward(
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
) -> tuple[Tensor, Tensor | None, Tensor, *States]:
    """(o, what rounding took off its beginning, 1 / denominator, kv and z before each chunk, kv and z at the end);
    states are tiled."""
    q, k, v = _rows(q), _rows(k), _rows(v)
    initial = None if kv_initial is None or z_initial is None else (kv_initial.contiguous(), z_initial.contiguous())
    call = prepare(q, v, cu_seqlens, c0, c1, initial is not None or want_final)
    if call.plan.chunk is None:
        states = NO_STATES
    else:
        states = _totals(call, k, v, None, initial, (c0, c1, c2), backward=False, want_final=want_final)
    o, o_rest = _empty(*v.shape, like=v), None
    if keeps_rest(v):
        o_rest = _empty(*call.rest_shape, like=v)
    inverse = _empty(call.B, call.H, call.T, like=q, dtype=torch.float32)
    tile, strides = call.plan.forward, _strides(q, k, v)
    blocks = cut(call.B, call.T, tile.rows, call.cu_seqlens)
    launch(
        forward_kernel, (blocks.count * call.H,),
        q, k, v, o, o_rest, inverse, *states[:2],
        call.cu_seqlens, blocks.first, blocks.owner, call.chunks.first,
        *strides,
        call.T, call.H, blocks.per_sequence, call.chunks.per_sequence, call.plan.chunk or call.T,
        c0, c1, c2, eps,
        **call.widths, **call.features, BM=tile.rows, BN=tile.step,
        LOW=call.low, HAS_STATES=call.plan.chunk is not None, HAS_INITIAL=initial is not None,
        PACKED=cu_seqlens is not None, EVEN=call.is_even(tile), WIDE=_wide(call, strides), PRECISION=call.precision,
        REST_LIKE_O=call.rest_like_o,
        **tile.options,
    )  # fmt: skip
    return o, o_rest, inverse, *states


def backward(
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
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """(dq, dk, dv, gradients of the initial state's kv and z); d_kv and d_z are those of the final one."""
    q, k, v, do = _rows(q), _rows(k), _rows(v), _rows(do)
    call = prepare(q, v, cu_seqlens, c0, c1, has_initial or has_final)
    has_states = call.plan.chunk is not None
    dq = _empty(*q.shape, like=q)
    dk, dv = _empty(*k.shape, like=k), _empty(*v.shape, like=v)
    deltas = _empty(call.B, call.H, call.T, like=q, dtype=torch.float32)
    strides = _strides(q, k, v, do)
    common: dict[str, Any] = {
        **call.widths, **call.features, "LOW": call.low, "HAS_STATES": has_states, "PACKED": cu_seqlens is not None,
        "WIDE": _wide(call, strides), "PRECISION": call.precision,
    }  # fmt: skip

    def where(blocks: Blocks) -> tuple[Any, ...]:
        return (
            call.cu_seqlens, blocks.first, blocks.owner, call.chunks.first,
            *strides,
            call.T, call.H, blocks.per_sequence, call.chunks.per_sequence, call.plan.chunk or call.T,
            c0, c1, c2,
        )  # fmt: skip

    tile = call.plan.query_grad
    blocks = cut(call.B, call.T, tile.rows, call.cu_seqlens)
    launch(
        query_grad_kernel, (blocks.count * call.H,),
        q, k, v, o, o_rest if keeps_rest(v) else None, do, inverse, dq, deltas,
        *((kv, z) if has_states else (None, None)), *where(blocks),
        BM=tile.rows, BN=tile.step, HAS_INITIAL=has_initial, EVEN=call.is_even(tile), REST_LIKE_O=call.rest_like_o,
        **common, **tile.options,
    )  # fmt: skip
    d_final, states = None, NO_STATES
    if has_states:
        if d_kv is not None or d_z is not None:
            kv_shape, z_shape = call.state_shapes(call.sequences)
            d_final = (_or_zeros(d_kv, kv_shape, q), _or_zeros(d_z, z_shape, q))
        states = _totals(call, q, do, (inverse, deltas), d_final, (c0, c1, c2), backward=True, want_final=has_initial)
    tile = call.plan.key_grad
    blocks = cut(call.B, call.T, tile.rows, call.cu_seqlens)
    launch(
        key_grad_kernel, (blocks.count * call.H,),
        q, k, v, do, inverse, deltas, dk, dv, *states[:2], *where(blocks),
        BM=tile.step, BN=tile.rows, HAS_FINAL=d_final is not None, EVEN=call.is_even(tile), **common, **tile.options,
    )  # fmt: skip
    return dq, dk, dv, states[2], states[3]
