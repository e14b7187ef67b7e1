# mypy: allow-untyped-defs
"""Polynomial attention of some queries only: n of them per row, each at a position of its own, with all T keys.

The kernels are those of the quadratic regime, with a position read for each query. All keys up to the last position of
a tile of queries are met, and those after each query are masked. There are no states, packed documents or chunks.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rebased.ops.kernel_launch import launch
from rebased.ops.polynomial.gpu import check, in_torch
from rebased.ops.polynomial.gpu.backward import add_key_grad, add_query_grad, as_multiplied
from rebased.ops.polynomial.gpu.call import choose_products, keeps_o_lo, rows_of, take_safe_tiles, unit_of
from rebased.ops.polynomial.gpu.features import find_head, load_rows, positions
from rebased.ops.polynomial.gpu.forward import add_keys
from rebased.ops.polynomial.gpu.plan import Tile, Tiles, find_tiles, padded
from rebased.ops.self_check import checked


@triton.jit
def _locate(H, per_row, SIZE: tl.constexpr):
    """The head, the batch row, and the first of the SIZE queries (or keys) of this program."""
    pid = tl.program_id(0)
    tile = pid // H
    return pid % H, (tile // per_row).to(tl.int64), (tile % per_row) * SIZE


@triton.jit
def forward_at_kernel(
    q, k, v, at, o, o_lo, inverse,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head,
    n, T, H, per_row, c0, c1, c2, eps,
    K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr, VP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    LOW: tl.constexpr, EVEN_QUERIES: tl.constexpr, EVEN_KEYS: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr, K_UNIT: tl.constexpr, V_UNIT: tl.constexpr,
):  # fmt: skip
    """o [B, n, H, V] and inverse [B, H, n] = 1 / (sum of similarities + eps), for BM queries of one head. o_lo is the
    rounding error of o, where o is in half precision."""
    h, row, first = _locate(H, per_row, BM)
    q = find_head(q, row, row * 0, h, q_batch, q_token, q_head, K_UNIT)
    k = find_head(k, row, row * 0, h, k_batch, k_token, k_head, K_UNIT)
    v = find_head(v, row, row * 0, h, v_batch, v_token, v_head, V_UNIT)
    HALF: tl.constexpr = v.dtype.element_ty == tl.bfloat16
    dtype: tl.constexpr = tl.bfloat16 if HALF else tl.float32
    rows = positions(first, BM, WIDE)
    places = tl.load(at + row * n + rows, mask=rows < n, other=-1)
    queries = load_rows(q, q_token, rows, n, K, KP, not EVEN_QUERIES)
    acc = tl.zeros([BM, VP], tl.float32)
    total = tl.zeros([BM, 16], tl.float32)
    for key in range(0, tl.max(places, 0) + 1, BN):
        acc, total = add_keys(acc, total, queries, k, k_token, v, v_token, key, places, T, c0, c1, c2,
                              K, KP, V, VP, BN, True, LOW, EVEN_KEYS, WIDE, PRECISION, dtype)  # fmt: skip
    total = tl.sum(total if V == VP else tl.where(tl.arange(0, VP)[None, :] == V, acc, 0.0), 1)
    if not LOW:
        acc *= c2
        total *= c2
    scale = 1.0 / (total + eps)
    columns = tl.arange(0, VP)
    tl.store(inverse + (row * H + h) * n + rows, scale, mask=rows < n)
    mask = (rows < n)[:, None] & (columns < V)[None, :]
    acc *= scale[:, None]
    outputs = acc.to(o.dtype.element_ty)
    there = (row * n * H + h) * V + (rows[:, None] * (H * V) + columns[None, :])
    tl.store(o + there, outputs, mask=mask)
    if o_lo is not None:
        tl.store(o_lo + there, (acc - outputs.to(tl.float32)).to(o.dtype.element_ty), mask=mask)


@triton.jit
def query_grad_at_kernel(
    q, k, v, at, o, o_lo, do, inverse, dq, deltas,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head, do_batch, do_token, do_head,
    n, T, H, per_row, c1, c2,
    K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr, VP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    LOW: tl.constexpr, EVEN_QUERIES: tl.constexpr, EVEN_KEYS: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr, K_UNIT: tl.constexpr, V_UNIT: tl.constexpr,
):  # fmt: skip
    """dq [B, n, H, K], and deltas [B, H, n] = -(do . o) for the next kernel."""
    h, row, first = _locate(H, per_row, BM)
    q = find_head(q, row, row * 0, h, q_batch, q_token, q_head, K_UNIT)
    k = find_head(k, row, row * 0, h, k_batch, k_token, k_head, K_UNIT)
    v = find_head(v, row, row * 0, h, v_batch, v_token, v_head, V_UNIT)
    do = find_head(do, row, row * 0, h, do_batch, do_token, do_head, V_UNIT)
    HALF: tl.constexpr = v.dtype.element_ty == tl.bfloat16
    dtype: tl.constexpr = tl.bfloat16 if HALF else tl.float32
    rows = positions(first, BM, WIDE)
    places = tl.load(at + row * n + rows, mask=rows < n, other=-1)
    scalars = (row * H + h) * n
    here = (row * n * H + h) * V
    scale = tl.load(inverse + scalars + rows, mask=rows < n, other=0.0)
    grads = as_multiplied(load_rows(do, do_token, rows, n, V, VP, not EVEN_QUERIES), PRECISION)
    outputs = load_rows(o + here, H * V, rows, n, V, VP, not EVEN_QUERIES).to(tl.float32)
    if o_lo is not None:
        outputs += load_rows(o_lo + here, H * V, rows, n, V, VP, not EVEN_QUERIES).to(tl.float32)
    delta = -tl.sum(grads.to(tl.float32) * outputs, 1)
    tl.store(deltas + scalars + rows, delta, mask=rows < n)
    grads = grads.to(dtype)
    queries = load_rows(q, q_token, rows, n, K, KP, not EVEN_QUERIES)
    acc = tl.zeros([BM, KP], tl.float32)
    for key in range(0, tl.max(places, 0) + 1, BN):
        acc = add_query_grad(acc, queries, grads, delta, k, k_token, v, v_token, key, places, T, c1, c2,
                             K, KP, V, VP, BM, BN, True, True, LOW, EVEN_KEYS, WIDE, PRECISION, dtype)  # fmt: skip
    acc *= (2.0 if LOW else 2.0 * c2) * scale[:, None]
    columns = tl.arange(0, KP)
    tl.store(
        dq + (row * n * H + h) * K + (rows[:, None] * (H * K) + columns[None, :]),
        acc.to(dq.dtype.element_ty),
        mask=(rows < n)[:, None] & (columns < K)[None, :],
    )


@triton.jit
def key_grad_at_kernel(
    q, k, v, at, do, inverse, deltas, dk, dv,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head, do_batch, do_token, do_head,
    n, T, H, per_row, c0, c1, c2,
    K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr, VP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    LOW: tl.constexpr, EVEN_QUERIES: tl.constexpr, EVEN_KEYS: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr, K_UNIT: tl.constexpr, V_UNIT: tl.constexpr,
):  # fmt: skip
    """dk [B, T, H, K] and dv [B, T, H, V] for BN keys of one head."""
    h, row, first = _locate(H, per_row, BN)
    q = find_head(q, row, row * 0, h, q_batch, q_token, q_head, K_UNIT)
    k = find_head(k, row, row * 0, h, k_batch, k_token, k_head, K_UNIT)
    v = find_head(v, row, row * 0, h, v_batch, v_token, v_head, V_UNIT)
    do = find_head(do, row, row * 0, h, do_batch, do_token, do_head, V_UNIT)
    scalars = (row * H + h) * n
    HALF: tl.constexpr = v.dtype.element_ty == tl.bfloat16
    dtype: tl.constexpr = tl.bfloat16 if HALF else tl.float32
    columns = positions(first, BN, WIDE)
    keys = load_rows(k, k_token, columns, T, K, KP, not EVEN_KEYS)
    values = load_rows(v, v_token, columns, T, V, VP, not EVEN_KEYS).to(dtype)
    acc_k = tl.zeros([BN, KP], tl.float32)
    acc_v = tl.zeros([BN, VP], tl.float32)
    for query in range(0, n, BM):
        acc_k, acc_v = add_key_grad(acc_k, acc_v, keys, values, q, q_token, do, do_token, inverse + scalars,
                                    deltas + scalars, query, columns, n, c0, c1, c2,
                                    K, KP, V, VP, BM, BN, True, LOW, EVEN_QUERIES, WIDE, PRECISION, dtype,
                                    at + row * n)  # fmt: skip
    acc_k *= 2.0
    here = row * T * H + h
    width = tl.arange(0, KP)
    tl.store(
        dk + here * K + (columns[:, None] * (H * K) + width[None, :]),
        acc_k.to(dk.dtype.element_ty),
        mask=(columns < T)[:, None] & (width < K)[None, :],
    )
    width = tl.arange(0, VP)
    tl.store(
        dv + here * V + (columns[:, None] * (H * V) + width[None, :]),
        acc_v.to(dv.dtype.element_ty),
        mask=(columns < T)[:, None] & (width < V)[None, :],
    )


def _tiles(q: Tensor, k: Tensor, v: Tensor, low: bool) -> Tiles:
    return find_tiles(choose_products(q), "quadratic", k.shape[1], k.shape[3], v.shape[3], low)


def _numbers(*tensors: Tensor) -> list[int]:
    """The strides of batch, token and head of each."""
    return [stride for x in tensors for stride in x.stride()[:3]]


def _constants(q: Tensor, k: Tensor, v: Tensor, do: Tensor | None, low: bool, tile: Tile, keys: bool) -> dict[str, Any]:
    """The constants of a kernel. keys: its programs take `rows` keys and meet `step` queries at a time."""
    (_, n, H, K), T, V = q.shape, k.shape[1], v.shape[3]
    values = (v.stride(),) if do is None else (v.stride(), do.stride())
    widest = max(H * max(K, V), *(abs(x.stride(1)) for x in (q, k, v)), 0 if do is None else abs(do.stride(1)))
    queries_at_once, keys_at_once = (tile.step, tile.rows) if keys else (tile.rows, tile.step)
    return {
        "K": K, "KP": padded(K), "V": V, "VP": padded(V), "BM": queries_at_once, "BN": keys_at_once, "LOW": low,
        "EVEN_QUERIES": n % queries_at_once == 0, "EVEN_KEYS": T % keys_at_once == 0,
        "WIDE": max(n, T) * widest >= 2**31, "PRECISION": "tf32x3" if choose_products(q) == "tf32x3" else "tf32",
        "K_UNIT": unit_of((q.stride(), k.stride())), "V_UNIT": unit_of(values), **tile.options,
    }  # fmt: skip


def _safer(k: Tensor, v: Tensor) -> bool:
    return take_safe_tiles(choose_products(k), k.shape[3], v.shape[3])


@torch.library.custom_op("rebased::poly_at", mutates_args=())
@checked(in_torch.attend_at, compare=check.compare_at, safer=lambda q, k, v, *_: _safer(k, v))
def poly_at(
    q: Tensor, k: Tensor, v: Tensor, at: Tensor, c0: float, c1: float, c2: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """o [B, n, H, V], its rounding error (empty unless o is in half precision) and inverse [B, H, n].

    q [B, n, H, K], k [B, T, H, K], v [B, T, H, V], at [B, n] int32; coefficients are those of the bare q . k."""
    (B, n, H, _), low = q.shape, c0 != 0 or c1 != 0
    tile = _tiles(q, k, v, low).forward
    o = v.new_empty(B, n, H, v.shape[3])
    o_lo = torch.empty_like(o) if keeps_o_lo(v) else None
    inverse = q.new_empty(B, H, n, dtype=torch.float32)
    per_row = triton.cdiv(n, tile.rows)
    launch(
        forward_at_kernel, (B * H * per_row,),
        q, k, v, at, o, o_lo, inverse, *_numbers(q, k, v),
        n, k.shape[1], H, per_row, c0, c1, c2, eps, **_constants(q, k, v, None, low, tile, keys=False),
    )  # fmt: skip
    return o, o.new_empty(0) if o_lo is None else o_lo, inverse


@poly_at.register_fake
def _(q, k, v, at, c0, c1, c2, eps):
    B, n, H, _ = q.shape
    o = v.new_empty(B, n, H, v.shape[3])
    lo = torch.empty_like(o) if keeps_o_lo(v) else o.new_empty(0)
    return o, lo, q.new_empty(B, H, n, dtype=torch.float32)


@torch.library.custom_op("rebased::poly_at_backward", mutates_args=())
@checked(in_torch.attend_at_backward, compare=check.compare_at_backward, safer=lambda do, q, k, v, *_: _safer(k, v))
def poly_at_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, at: Tensor, o: Tensor, o_lo: Tensor, inverse: Tensor,
    c0: float, c1: float, c2: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k and v."""
    (B, n, H, _), T, low = q.shape, k.shape[1], c0 != 0 or c1 != 0
    tiles, strides = _tiles(q, k, v, low), _numbers(q, k, v, do)
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    deltas = torch.empty_like(inverse)
    per_row = triton.cdiv(n, tiles.query_grad.rows)
    launch(
        query_grad_at_kernel, (B * H * per_row,),
        q, k, v, at, o, o_lo if keeps_o_lo(v) else None, do, inverse, dq, deltas, *strides,
        n, T, H, per_row, c1, c2, **_constants(q, k, v, do, low, tiles.query_grad, keys=False),
    )  # fmt: skip
    per_row = triton.cdiv(T, tiles.key_grad.rows)
    launch(
        key_grad_at_kernel, (B * H * per_row,),
        q, k, v, at, do, inverse, deltas, dk, dv, *strides,
        n, T, H, per_row, c0, c1, c2, **_constants(q, k, v, do, low, tiles.key_grad, keys=True),
    )  # fmt: skip
    return dq, dk, dv


@poly_at_backward.register_fake
def _(do, q, k, v, at, o, o_lo, inverse, c0, c1, c2):
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))


def _setup(ctx, inputs, output):
    q, k, v, at, *ctx.coefficients, _ = inputs
    ctx.save_for_backward(q, k, v, at, *output)


def _autograd(ctx, do, _, __):
    return *poly_at_backward(rows_of(do), *ctx.saved_tensors, *ctx.coefficients), *[None] * 5


poly_at.register_autograd(_autograd, setup_context=_setup)
