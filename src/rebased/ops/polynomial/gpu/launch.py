"""Launches the kernels: forward, backward and decode as plain functions, which know nothing of autograd.

Python takes longer than the kernels of a short sequence. So whatever sizes settle is made once and found again: a Call,
and for each kernel a Launch that wants only tensors.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from rebased.ops.kernel_launch import Launch, launch
from rebased.ops.polynomial.gpu.backward import key_grad_kernel, query_grad_kernel
from rebased.ops.polynomial.gpu.blocks import Blocks, count_blocks, find_documents
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


Strides = tuple[tuple[int, ...], ...]  # of each input
States = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]  # kv and z before each chunk, and at the end
NO_STATES: States = (None, None, None, None)
Documents = tuple[Tensor | None, Tensor | None, Tensor | None]  # cu_seqlens, and which blocks belong to which
NO_DOCUMENTS: Documents = (None, None, None)


def kept(q: Tensor) -> torch.dtype:
    """The precision in which products read states."""
    return torch.bfloat16 if q.dtype == torch.bfloat16 else torch.float32


def keeps_rest(v: Tensor) -> bool:
    """Whether outputs are rounded, and what the first lose is kept for the backward pass."""
    return v.dtype != torch.float32


def _empty(*shape: int, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Whatever a kernel writes is made here, so that tests can poison it."""
    return torch.empty(shape, device=like.device, dtype=dtype or like.dtype)


@dataclass(frozen=True, eq=False)
class Call:
    """What the sizes of a call settle; the same sizes find the same one again."""

    B: int
    T: int
    H: int
    K: int
    V: int
    low: bool
    plan: Plan
    products: Products
    documents: int | None  # that share the T tokens, or None

    @property
    def sequences(self) -> int:
        return self.B if self.documents is None else self.documents

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

    @property
    def chunk(self) -> int:
        """Tokens between states; all where there are none."""
        return self.plan.chunk or self.T

    def blocks(self, size: int) -> Blocks:
        return count_blocks(self.B, self.T, size, self.documents)

    def find(self, cu_seqlens: Tensor | None, size: int) -> Documents:
        """Where kernels look documents up that are cut into blocks of so many tokens."""
        if cu_seqlens is None:
            return NO_DOCUMENTS
        cu_seqlens = cu_seqlens.to(torch.int32)
        return cu_seqlens, *find_documents(cu_seqlens, size, self.blocks(size).total)

    def constants(self, tile: Tile, strides: Strides) -> dict[str, Any]:
        """Of a kernel that meets queries and keys, or sums over either. EVEN: all tiles are full. WIDE: an offset in
        one batch row, of inputs or of what the kernels write, may not fit into 32 bits."""
        packed, token = self.documents is not None, max(self.H * max(self.K, self.V), *(abs(s[1]) for s in strides))
        return {
            "K": self.K, "V": self.V, "VP": padded(self.V), **self.features, "PRECISION": self.precision,
            "PACKED": packed, "EVEN": not packed and self.T % max(tile.rows, tile.step) == 0,
            "WIDE": self.T * token >= 2**31, **tile.options,
        }  # fmt: skip


def prepare(q: Tensor, v: Tensor, cu_seqlens: Tensor | None, c0: float, c1: float, has_state: bool) -> Call:
    products: Products = "tf32"
    if q.dtype == torch.bfloat16:
        products = "bf16"
    elif q.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest":
        products = "tf32x3"
    sizes = (*q.shape, v.shape[-1], None if cu_seqlens is None else cu_seqlens.shape[0] - 1)
    known = all(size is None or type(size) is int for size in sizes)  # torch.compile's symbols cannot be looked up
    make = _call if known else _call.__wrapped__
    return make(make_plan, *sizes, c0 != 0 or c1 != 0, products, has_state)


@lru_cache(maxsize=1024)
def _call(
    planner: Callable[..., Plan],
    B: int,
    T: int,
    H: int,
    K: int,
    V: int,
    documents: int | None,
    low: bool,
    products: Products,
    has_state: bool,
) -> Call:
    plan = planner(T, K, V, low=low, products=products, has_state=has_state)
    return Call(B, T, H, K, V, low, plan, products, documents)


def _or_zeros(x: Tensor | None, shape: tuple[int, ...], like: Tensor) -> Tensor:
    return like.new_zeros(shape, dtype=torch.float32) if x is None else x.contiguous()


def _rows(x: Tensor) -> Tensor:
    """The kernels read a row of a head as neighbours in memory; any other stride is free."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _strides(*tensors: Tensor) -> Strides:
    return tuple([x.stride() for x in tensors])


def _numbers(strides: Strides) -> list[int]:
    return [number for stride in strides for number in stride[:3]]


@lru_cache(maxsize=1024)
def _sums_launch(
    kernel: Any, call: Call, strides: Strides, tile: Tile, weighted: bool, backward: bool, want_final: bool
) -> Launch:
    chunks, blocks = call.blocks(call.chunk), call.features["BLOCKS"]
    group = min(blocks, call.plan.group)
    return Launch(
        kernel, (chunks.total * call.H, -(-blocks // group)),
        *_numbers(strides), call.T, call.H, chunks.per_sequence,
        **call.constants(tile, strides), GROUP=group, CHUNK=call.chunk, BT=tile.step,
        WEIGHTED=weighted, WHOLE=call.plan.whole, BACKWARD=backward, ALL=want_final,
    )  # fmt: skip


@lru_cache(maxsize=1024)
def _totals_launch(
    kernel: Any, call: Call, coefficients: Coefficients, has_initial: bool, want_final: bool, backward: bool
) -> Launch:
    width, blocks = padded(call.V), call.features["BLOCKS"]
    parts = blocks * FEATURE_BLOCK * width // TOTALS["SPAN"] + blocks
    return Launch(
        kernel, (call.sequences * call.H * parts,),
        *coefficients, call.H, call.blocks(call.chunk).per_sequence,
        K=call.K, VP=width, **call.features, HAS_INITIAL=has_initial, WANT_FINAL=want_final, BACKWARD=backward,
        PACKED=call.documents is not None, **TOTALS,
    )  # fmt: skip


def _totals(
    call: Call,
    x: Tensor,
    y: Tensor,
    scalars: tuple[Tensor, Tensor] | None,
    initial: tuple[Tensor, Tensor] | None,
    documents: Documents,
    coefficients: Coefficients,
    backward: bool,
    want_final: bool,
) -> States:
    """(kv, z) before each chunk and (kv, z) after all tokens, of phi(x)^T [y, 1]; backward, time is turned round."""

    def empty(count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        kv, z = call.state_shapes(count)
        return _empty(*kv, like=x, dtype=dtype), _empty(*z, like=x, dtype=torch.float32)

    count = call.blocks(call.chunk).total
    totals = empty(count, kept(x))
    sums = empty(count, torch.float32)
    final = empty(call.sequences, torch.float32) if want_final else (None, None)
    tile = call.plan.sums
    if backward and call.plan.grad_sums is not None:
        tile = call.plan.grad_sums
    weighted = scalars is not None
    run = _sums_launch(chunk_sums_kernel, call, _strides(x, y), tile, weighted, backward, want_final)
    run(x, y, *(scalars or (None, None)), *sums, *documents)
    has_initial = initial is not None
    run = _totals_launch(running_totals_kernel, call, coefficients, has_initial, want_final, backward)
    run(*sums, *(initial or (None, None)), *totals, *final, documents[1])
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


@lru_cache(maxsize=1024)
def _forward_launch(
    kernel: Any, call: Call, strides: Strides, coefficients: Coefficients, eps: float, has_initial: bool
) -> Launch:
    tile = call.plan.forward
    blocks, chunks = call.blocks(tile.rows), call.blocks(call.chunk)
    return Launch(
        kernel, (blocks.total * call.H,),
        *_numbers(strides), call.T, call.H, blocks.per_sequence, chunks.per_sequence, call.chunk, *coefficients, eps,
        **call.constants(tile, strides), KP=padded(call.K), BM=tile.rows, BN=tile.step, LOW=call.low,
        HAS_STATES=call.plan.chunk is not None, HAS_INITIAL=has_initial, REST_LIKE_O=call.rest_like_o,
    )  # fmt: skip


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
    call, coefficients = prepare(q, v, cu_seqlens, c0, c1, initial is not None or want_final), (c0, c1, c2)
    chunks, states = NO_DOCUMENTS, NO_STATES
    if call.plan.chunk is not None:
        chunks = call.find(cu_seqlens, call.chunk)
        states = _totals(call, k, v, None, initial, chunks, coefficients, backward=False, want_final=want_final)
    o, o_rest = _empty(*v.shape, like=v), None
    if keeps_rest(v):
        o_rest = _empty(*call.rest_shape, like=v)
    inverse = _empty(call.B, call.H, call.T, like=q, dtype=torch.float32)
    run = _forward_launch(forward_kernel, call, _strides(q, k, v), coefficients, eps, initial is not None)
    blocks = call.find(cu_seqlens, call.plan.forward.rows)
    run(q, k, v, o, o_rest, inverse, *states[:2], *blocks, chunks[1])
    return o, o_rest, inverse, *states


@lru_cache(maxsize=1024)
def _gradient_launch(
    kernel: Any, call: Call, strides: Strides, tile: Tile, coefficients: Coefficients, **constants: Any
) -> Launch:
    blocks, chunks = call.blocks(tile.rows), call.blocks(call.chunk)
    return Launch(
        kernel, (blocks.total * call.H,),
        *_numbers(strides), call.T, call.H, blocks.per_sequence, chunks.per_sequence, call.chunk, *coefficients,
        **call.constants(tile, strides), KP=padded(call.K), LOW=call.low, HAS_STATES=call.plan.chunk is not None,
        **constants,
    )  # fmt: skip


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
    call, coefficients = prepare(q, v, cu_seqlens, c0, c1, has_initial or has_final), (c0, c1, c2)
    has_states = call.plan.chunk is not None
    dq = _empty(*q.shape, like=q)
    dk, dv = _empty(*k.shape, like=k), _empty(*v.shape, like=v)
    deltas = _empty(call.B, call.H, call.T, like=q, dtype=torch.float32)
    strides, chunks = _strides(q, k, v, do), call.find(cu_seqlens if has_states else None, call.chunk)

    tile = call.plan.query_grad
    run = _gradient_launch(
        query_grad_kernel, call, strides, tile, coefficients,
        BM=tile.rows, BN=tile.step, HAS_INITIAL=has_initial, REST_LIKE_O=call.rest_like_o,
    )  # fmt: skip
    before, rest = (kv, z) if has_states else (None, None), o_rest if keeps_rest(v) else None
    run(q, k, v, o, rest, do, inverse, dq, deltas, *before, *call.find(cu_seqlens, tile.rows), chunks[1])

    d_final, states = None, NO_STATES
    if has_states:
        if d_kv is not None or d_z is not None:
            kv_shape, z_shape = call.state_shapes(call.sequences)
            d_final = (_or_zeros(d_kv, kv_shape, q), _or_zeros(d_z, z_shape, q))
        scalars = (inverse, deltas)
        states = _totals(call, q, do, scalars, d_final, chunks, coefficients, backward=True, want_final=has_initial)

    tile = call.plan.key_grad
    run = _gradient_launch(
        key_grad_kernel, call, strides, tile, coefficients,
        BM=tile.step, BN=tile.rows, HAS_FINAL=d_final is not None,
    )  # fmt: skip
    run(q, k, v, do, inverse, deltas, dk, dv, *states[:2], *call.find(cu_seqlens, tile.rows), chunks[1])
    return dq, dk, dv, states[2], states[3]
