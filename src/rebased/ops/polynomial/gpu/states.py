"""Sums of features over tokens, and their running totals: the part of the work that makes time linear.

A state is a matrix kv [F, VP] = phi(k)^T v and a vector z [F] = phi(k)^T 1. Sums are kept in fp32; of running totals kv
is rounded to what the tensor cores read, z is not: it makes the denominator.
"""

import triton
import triton.language as tl

from rebased.ops.polynomial.gpu.features import (
    BLOCK,
    load_linear_across,
    load_rows,
    load_tile_across,
    locate,
    outer_across,
    outer_rest_across,
    pair_of,
    positions,
    rounded,
)


@triton.jit
def _add_block(acc, z, x, stride, scale, rows, n_rows, x0, x1, values, ones, block, WEIGHTED: tl.constexpr,
               WHOLE: tl.constexpr, K: tl.constexpr, TILES: tl.constexpr, PAIRS: tl.constexpr, LOW: tl.constexpr,
               BT: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """acc [64, VP] and z [64, 16] plus one feature block of these tokens."""
    if LOW and block >= PAIRS:
        across = load_linear_across(x, stride, rows, n_rows, block - PAIRS, K)
        if WEIGHTED:
            across *= scale[None, :]
        across = across.to(values.dtype)
    else:
        if TILES > 2:  # in the last group some may be missing: what stands for them is never stored
            block = tl.minimum(block, PAIRS - 1)
        a, b = pair_of(block, TILES)
        if TILES > 2:
            xa = load_tile_across(x, stride, rows, n_rows, a, K, not EVEN)
            xb = load_tile_across(x, stride, rows, n_rows, b, K, not EVEN)
        else:
            xa = x0 if a == 0 else x1
            xb = x0 if b == 0 else x1
        xb_rest = None
        if WEIGHTED:
            scaled = xb * scale[None, :]
            if WHOLE:
                xb = rounded(scaled, values.dtype)
                xb_rest = (scaled - xb).to(values.dtype)
                xb = xb.to(values.dtype)
        if WEIGHTED and not WHOLE:  # one rounding of a product of three
            across = outer_across(xa, scaled, BT, tl.float32).to(values.dtype)
        else:
            across = outer_across(xa, xb, BT, values.dtype)
        if WHOLE:
            rest = outer_rest_across(xa, xb, xb_rest, across, BT)
            acc = tl.dot(rest, values, acc)
            z = tl.dot(rest, ones, z)
    acc = tl.dot(across, values, acc, input_precision=PRECISION)
    z = tl.dot(across, ones, z, input_precision=PRECISION)
    return acc, z


@triton.jit
def _weights(feature, block, c0, c1, c2, K: tl.constexpr, TILES: tl.constexpr, PAIRS: tl.constexpr,
             LOW: tl.constexpr):  # fmt: skip
    """What stands before each of these features, all of one block."""
    if LOW and block >= PAIRS:
        linear = feature - PAIRS * BLOCK
        w = tl.where(linear < K, c1, tl.where(linear == K, c0, 0.0))
    else:
        a, b = pair_of(block, TILES)
        w = feature * 0.0 + tl.where(a < b, 2.0 * c2, c2)
    return w


@triton.jit
def _store_block(acc, z, kv_to, z_to, block, VP: tl.constexpr):
    f = tl.arange(0, BLOCK) + block * BLOCK
    tl.store(kv_to + (f[:, None] * VP + tl.arange(0, VP)[None, :]), acc)
    tl.store(z_to + f, tl.sum(z, 1))


@triton.jit(do_not_specialize=["blocks_per_sequence"])
def chunk_sums_kernel(
    x, y, scale, weight, kv, z,
    cu_seqlens, first_block, owner,
    x_batch, x_token, x_head, y_batch, y_token, y_head,
    T, H, blocks_per_sequence,
    K: tl.constexpr, V: tl.constexpr, VP: tl.constexpr,
    TILES: tl.constexpr, PAIRS: tl.constexpr, BLOCKS: tl.constexpr, GROUP: tl.constexpr,
    CHUNK: tl.constexpr, BT: tl.constexpr,
    WEIGHTED: tl.constexpr, WHOLE: tl.constexpr, BACKWARD: tl.constexpr, ALL: tl.constexpr, PACKED: tl.constexpr,
    EVEN: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """kv [chunk,h,F,VP] and z [chunk,h,F] = sums over a chunk's tokens of phi(x)^T [y, 1]; if not ALL, less the last
    chunk in time, which no running total needs.

    WEIGHTED: phi is multiplied by `scale` [B,H,T], and in place of 1 stands `weight` [B,H,T]. WHOLE: features x_i x_j
    go in as two numbers of bf16. A program takes GROUP of the BLOCKS feature blocks (at most four), so that x and y are
    read once for all of them. What the running totals read first is written last, and may still be in the cache then.
    """
    pid = tl.program_id(0)
    if not BACKWARD:
        pid = tl.num_programs(0) - 1 - pid
    h = pid % H
    chunk = pid // H
    _, row, inside, start, length = locate(chunk, cu_seqlens, first_block, owner, T, blocks_per_sequence, PACKED)
    if not ALL:
        last = inside == 0 if BACKWARD else (inside + 1) * CHUNK >= length
        if last:
            return
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
    z0 = tl.zeros([BLOCK, 16], tl.float32)
    acc1, acc2, acc3 = acc0, acc0, acc0
    z1, z2, z3 = z0, z0, z0
    column = tl.arange(0, 16)[None, :]
    for t in range(inside * CHUNK, tl.minimum(inside * CHUNK + CHUNK, length), BT):
        rows = positions(t, BT, WIDE)
        values = load_rows(y, y_token, rows, length, V, VP, not EVEN).to(dtype)
        factor = 1.0
        ones = (rows < length).to(tl.float32)
        if WEIGHTED:
            factor = tl.load(scale + rows, mask=rows < length, other=0.0)
            ones = tl.load(weight + rows, mask=rows < length, other=0.0)
        most = rounded(ones, dtype)
        ones = tl.where(column == 0, most[:, None], tl.where(column == 1, (ones - most)[:, None], 0.0)).to(dtype)
        x0 = load_tile_across(x, x_token, rows, length, 0, K, not EVEN)
        x1 = x0
        if TILES == 2:
            x1 = load_tile_across(x, x_token, rows, length, 1, K, not EVEN)
        acc0, z0 = _add_block(acc0, z0, x, x_token, factor, rows, length, x0, x1, values, ones, block, WEIGHTED,
                              WHOLE, K, TILES, PAIRS, LOW, BT, EVEN, PRECISION)  # fmt: skip
        if GROUP > 1:
            acc1, z1 = _add_block(acc1, z1, x, x_token, factor, rows, length, x0, x1, values, ones, block + 1, WEIGHTED,
                                  WHOLE, K, TILES, PAIRS, LOW, BT, EVEN, PRECISION)  # fmt: skip
        if GROUP > 2:
            acc2, z2 = _add_block(acc2, z2, x, x_token, factor, rows, length, x0, x1, values, ones, block + 2, WEIGHTED,
                                  WHOLE, K, TILES, PAIRS, LOW, BT, EVEN, PRECISION)  # fmt: skip
        if GROUP > 3:
            acc3, z3 = _add_block(acc3, z3, x, x_token, factor, rows, length, x0, x1, values, ones, block + 3, WEIGHTED,
                                  WHOLE, K, TILES, PAIRS, LOW, BT, EVEN, PRECISION)  # fmt: skip

    to = (chunk.to(tl.int64) * H + h) * (BLOCKS * BLOCK)
    kv += to * VP
    z += to
    _store_block(acc0, z0, kv, z, block, VP)
    if GROUP > 1 and block + 1 < BLOCKS:
        _store_block(acc1, z1, kv, z, block + 1, VP)
    if GROUP > 2 and block + 2 < BLOCKS:
        _store_block(acc2, z2, kv, z, block + 2, VP)
    if GROUP > 3 and block + 3 < BLOCKS:
        _store_block(acc3, z3, kv, z, block + 3, VP)


@triton.jit
def _run(sums, initial, totals, final, w, offset, sequence, begin, count, H, h,
         SIZE: tl.constexpr, HAS_INITIAL: tl.constexpr, WANT_FINAL: tl.constexpr, BACKWARD: tl.constexpr,
         STAGES: tl.constexpr):  # fmt: skip
    """The running totals of the numbers at `offset` in the states of SIZE numbers of one head of one sequence."""
    ends = (sequence.to(tl.int64) * H + h) * SIZE + offset
    total = w * 0.0
    if HAS_INITIAL:
        start = tl.load(initial + ends)
    else:
        start = total
    for step in tl.range(0, count, num_stages=STAGES):  # the last sum may be missing, and matters to `final` alone
        if BACKWARD:
            chunk = begin + count - 1 - step
            out = start + w * total
        else:
            chunk = begin + step
            out = w * (start + total)
        at = (chunk.to(tl.int64) * H + h) * SIZE + offset
        tl.store(totals + at, out.to(totals.dtype.element_ty))
        if WANT_FINAL:
            total += tl.load(sums + at)
        else:
            total += tl.load(sums + at, mask=(offset >= 0) & (step + 1 < count), other=0.0)
    if WANT_FINAL:
        if BACKWARD:
            total = w * total
        tl.store(final + ends, start + total)


@triton.jit(do_not_specialize=["blocks_per_sequence"])
def running_totals_kernel(
    kv_sums, z_sums, kv_initial, z_initial, kv, z, kv_final, z_final,
    first_block,
    c0, c1, c2,
    H, blocks_per_sequence,
    K: tl.constexpr, VP: tl.constexpr, TILES: tl.constexpr, PAIRS: tl.constexpr, BLOCKS: tl.constexpr,
    HAS_INITIAL: tl.constexpr, WANT_FINAL: tl.constexpr, BACKWARD: tl.constexpr, PACKED: tl.constexpr,
    SPAN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Exclusive running totals over the chunks of each sequence, with the weights of the features put on.

    Forward:   totals[c] = w * (initial + sums before c), final = initial + all sums.
    BACKWARD:  totals[c] = initial + w * (sums after c),  final = initial + w * all sums: the gradient of a state.
    A program takes SPAN numbers of kv (all of one feature block), or one block of z, of one (sequence, head).
    """
    PARTS: tl.constexpr = BLOCKS * BLOCK * VP // SPAN + BLOCKS
    part = tl.program_id(0) % PARTS
    pid = tl.program_id(0) // PARTS
    if BACKWARD:
        pid = tl.num_programs(0) // PARTS - 1 - pid
    sequence = pid // H
    h = pid % H
    if PACKED:
        begin = tl.load(first_block + sequence)
        count = tl.load(first_block + sequence + 1) - begin
    else:
        begin = sequence * blocks_per_sequence
        count = blocks_per_sequence
    F: tl.constexpr = BLOCKS * BLOCK
    LOW: tl.constexpr = BLOCKS > PAIRS
    if part < F * VP // SPAN:
        offset = part * SPAN + tl.arange(0, SPAN)
        w = _weights(offset // VP, part * SPAN // (BLOCK * VP), c0, c1, c2, K, TILES, PAIRS, LOW)
        _run(kv_sums, kv_initial, kv, kv_final, w, offset, sequence, begin, count, H, h, F * VP,
             HAS_INITIAL, WANT_FINAL, BACKWARD, STAGES)  # fmt: skip
    else:
        block = part - F * VP // SPAN
        f = tl.arange(0, BLOCK) + block * BLOCK
        z_w = _weights(f, block, c0, c1, c2, K, TILES, PAIRS, LOW)
        _run(z_sums, z_initial, z, z_final, z_w, f, sequence, begin, count, H, h, F,
             HAS_INITIAL, WANT_FINAL, BACKWARD, STAGES)  # fmt: skip


@triton.jit
def find_state(sequence, chunk, first_chunk, chunks_per_sequence, H, h, F: tl.constexpr, PACKED: tl.constexpr):
    """Where the running total of a chunk begins, counted in features."""
    if PACKED:
        chunk += tl.load(first_chunk + sequence)
    else:
        chunk += sequence * chunks_per_sequence
    return (chunk.to(tl.int64) * H + h) * F
