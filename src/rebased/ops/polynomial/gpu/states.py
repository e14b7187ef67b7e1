"""Sums of features over chunks, and their running totals: the part of the work that makes time linear.

A state is one matrix [F, VP + 16]: phi(k)^T v, then columns for z = phi(k)^T 1. In sums the first three of them hold z;
in running totals z rounded, what the rounding took from it, and z rounded again, so that half precision loses nothing:
sums over the first two are z, and a product with (x, x, rest of x) is x z.
"""

import triton
import triton.language as tl

from rebased.ops.polynomial.gpu.features import (
    BLOCK,
    EXTRA,
    load_linear_across,
    load_rows,
    load_tile_across,
    locate,
    outer_across,
    pair_of,
    positions,
)


@triton.jit
def _add_block(acc, z, x, stride, scale, rows, n_rows, x0, x1, values, ones, block, WEIGHTED: tl.constexpr,
               K: tl.constexpr, TILES: tl.constexpr, PAIRS: tl.constexpr, LOW: tl.constexpr, BT: tl.constexpr,
               PRECISION: tl.constexpr):  # fmt: skip
    """acc [64, VP] and z [64, 16] plus one feature block of these tokens."""
    if LOW and block >= PAIRS:
        across = load_linear_across(x, stride, rows, n_rows, block - PAIRS, K)
        if WEIGHTED:
            across *= tl.load(scale + rows, mask=rows < n_rows, other=0.0)[None, :]
        across = across.to(values.dtype)
    else:
        a, b = pair_of(block, TILES)
        if TILES > 2:
            xa = load_tile_across(x, stride, rows, n_rows, a, K)
            xb = load_tile_across(x, stride, rows, n_rows, b, K)
        else:
            xa = x0 if a == 0 else x1
            xb = x0 if b == 0 else x1
        if WEIGHTED:
            xa = xa * tl.load(scale + rows, mask=rows < n_rows, other=0.0)[None, :]
        across = outer_across(xa, xb, BT, values.dtype)
    acc = tl.dot(across, values, acc, input_precision=PRECISION)
    z = tl.dot(across, ones, z, input_precision=PRECISION)
    return acc, z


@triton.jit
def _store_block(acc, z, to, VP: tl.constexpr):
    f = tl.arange(0, BLOCK)[:, None] * (VP + EXTRA)
    tl.store(to + f + tl.arange(0, VP)[None, :], acc)
    tl.store(to + f + VP + tl.arange(0, EXTRA)[None, :], z)


@triton.jit(do_not_specialize=["blocks_per_sequence"])
def chunk_sums_kernel(
    x, y, scale, weight, sums,
    cu_seqlens, first_block, owner,
    x_batch, x_token, x_head, y_batch, y_token, y_head,
    T, H, blocks_per_sequence,
    K: tl.constexpr, V: tl.constexpr, VP: tl.constexpr,
    TILES: tl.constexpr, PAIRS: tl.constexpr, BLOCKS: tl.constexpr, GROUP: tl.constexpr,
    CHUNK: tl.constexpr, BT: tl.constexpr,
    WEIGHTED: tl.constexpr, PACKED: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """sums [chunk,h,F,VP+16] = sum over a chunk's tokens of phi(x)^T [y, 1].

    WEIGHTED: phi is multiplied by `scale` [B,H,T], and in place of 1 stands `weight` [B,H,T]. A program takes GROUP of
    the BLOCKS feature blocks (at most four), so that x and y are read once for all of them.
    """
    pid = tl.program_id(0)
    h = pid % H
    chunk = pid // H
    _, row, inside, start, length = locate(chunk, cu_seqlens, first_block, owner, T, blocks_per_sequence, PACKED)
    x += row * x_batch + start * x_token + h.to(tl.int64) * x_head
    y += row * y_batch + start * y_token + h.to(tl.int64) * y_head
    if WEIGHTED:
        scale += (row * H + h) * T + start
        weight += (row * H + h) * T + start
    LOW: tl.constexpr = BLOCKS > PAIRS
    if GROUP == BLOCKS:
        block: tl.constexpr = 0
    else:
        block = tl.program_id(1) * GROUP
    HALF: tl.constexpr = y.dtype.element_ty == tl.bfloat16
    dtype: tl.constexpr = tl.bfloat16 if HALF else tl.float32

    acc0 = tl.zeros([BLOCK, VP], tl.float32)
    z0 = tl.zeros([BLOCK, EXTRA], tl.float32)
    acc1, acc2, acc3 = acc0, acc0, acc0
    z1, z2, z3 = z0, z0, z0
    is_z = tl.arange(0, EXTRA)[None, :] < 3
    for t in range(inside * CHUNK, tl.minimum(inside * CHUNK + CHUNK, length), BT):
        rows = positions(t, BT, WIDE)
        values = load_rows(y, y_token, rows, length, V, VP, True)
        values = values.to(dtype)
        ones = (rows < length).to(tl.float32)
        if WEIGHTED:
            ones = tl.load(weight + rows, mask=rows < length, other=0.0)
        ones = tl.where(is_z, ones[:, None], 0.0).to(dtype)
        x0 = load_tile_across(x, x_token, rows, length, 0, K)
        x1 = x0
        if TILES == 2:
            x1 = load_tile_across(x, x_token, rows, length, 1, K)
        acc0, z0 = _add_block(acc0, z0, x, x_token, scale, rows, length, x0, x1, values, ones, block, WEIGHTED,
                              K, TILES, PAIRS, LOW, BT, PRECISION)  # fmt: skip
        if GROUP > 1:
            acc1, z1 = _add_block(acc1, z1, x, x_token, scale, rows, length, x0, x1, values, ones, block + 1, WEIGHTED,
                                  K, TILES, PAIRS, LOW, BT, PRECISION)  # fmt: skip
        if GROUP > 2:
            acc2, z2 = _add_block(acc2, z2, x, x_token, scale, rows, length, x0, x1, values, ones, block + 2, WEIGHTED,
                                  K, TILES, PAIRS, LOW, BT, PRECISION)  # fmt: skip
        if GROUP > 3:
            acc3, z3 = _add_block(acc3, z3, x, x_token, scale, rows, length, x0, x1, values, ones, block + 3, WEIGHTED,
                                  K, TILES, PAIRS, LOW, BT, PRECISION)  # fmt: skip

    SIZE: tl.constexpr = BLOCK * (VP + EXTRA)
    to = sums + ((chunk.to(tl.int64) * H + h) * BLOCKS + block) * SIZE
    _store_block(acc0, z0, to, VP)
    if GROUP > 1 and block + 1 < BLOCKS:
        _store_block(acc1, z1, to + SIZE, VP)
    if GROUP > 2 and block + 2 < BLOCKS:
        _store_block(acc2, z2, to + 2 * SIZE, VP)
    if GROUP > 3 and block + 3 < BLOCKS:
        _store_block(acc3, z3, to + 3 * SIZE, VP)


@triton.jit(do_not_specialize=["blocks_per_sequence"])
def running_totals_kernel(
    sums, initial, totals, final,
    first_block,
    c0, c1, c2,
    H, blocks_per_sequence,
    K: tl.constexpr, W: tl.constexpr, TILES: tl.constexpr, PAIRS: tl.constexpr, BLOCKS: tl.constexpr,
    HAS_INITIAL: tl.constexpr, WANT_FINAL: tl.constexpr, BACKWARD: tl.constexpr, PACKED: tl.constexpr,
    SPAN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Exclusive running totals over the chunks of each sequence, with the weights of the features put on.

    Forward:   totals[c] = w * (initial + sums before c), final = initial + all sums.
    BACKWARD:  totals[c] = initial + w * (sums after c),  final = initial + w * all sums: the gradient of a state.
    A program takes SPAN numbers (all of one feature block) of one (sequence, head).
    """
    pid = tl.program_id(0)
    sequence = pid // H
    h = pid % H
    if PACKED:
        begin = tl.load(first_block + sequence)
        count = tl.load(first_block + sequence + 1) - begin
    else:
        begin = sequence * blocks_per_sequence
        count = blocks_per_sequence
    SIZE: tl.constexpr = BLOCKS * BLOCK * W
    offset = tl.program_id(1) * SPAN + tl.arange(0, SPAN)
    block = tl.program_id(1) * SPAN // (BLOCK * W)
    if BLOCKS > PAIRS and block >= PAIRS:
        linear = offset // W - PAIRS * BLOCK
        w = tl.where(linear < K, c1, tl.where(linear == K, c0, 0.0))
    else:
        a, b = pair_of(block, TILES)
        w = tl.zeros([SPAN], tl.float32) + tl.where(a < b, 2.0 * c2, c2)

    is_rest = offset % W == W - EXTRA + 1
    ends = (sequence.to(tl.int64) * H + h) * SIZE + offset
    total = tl.zeros([SPAN], tl.float32)
    if HAS_INITIAL:
        start = tl.load(initial + ends)
    else:
        start = total
    for step in tl.range(0, count, num_stages=STAGES):
        if BACKWARD:
            chunk = begin + count - 1 - step
            out = start + w * total
        else:
            chunk = begin + step
            out = w * (start + total)
        at = (chunk.to(tl.int64) * H + h) * SIZE + offset
        rounded = out.to(totals.dtype.element_ty)
        rest = (out - rounded.to(tl.float32)).to(totals.dtype.element_ty)
        tl.store(totals + at, tl.where(is_rest, rest, rounded))
        total += tl.load(sums + at)
    if WANT_FINAL:
        if BACKWARD:
            total = w * total
        tl.store(final + ends, start + total)
