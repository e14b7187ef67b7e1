"""Sums of features over the tokens of a chunk, and their running totals: what makes the time linear in T.

A state is a matrix kv [F, VP] = phi(k)^T v and a vector z [F] = phi(k)^T 1. Sums are fp32. In running totals kv is
rounded to the precision of the products; z stays fp32, because it makes the denominator.
"""

import triton
import triton.language as tl

from rebased.ops.polynomial.gpu.features import (
    TILE,
    find_head,
    load_linear_across,
    load_rows,
    load_slice_across,
    locate,
    outer_across,
    outer_lo_across,
    pair_of,
    positions,
    rounded,
)


@triton.jit
def _add_tile(acc, z, x, stride, scale, rows, n_rows, x0, x1, values, ones, tile, WEIGHTED: tl.constexpr,
               HI_LO: tl.constexpr, K: tl.constexpr, SLICES: tl.constexpr, PAIRS: tl.constexpr, LOW: tl.constexpr,
               BT: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """acc [64, VP] and z [64, 16] plus one feature tile of these tokens."""
    if LOW and tile >= PAIRS:
        across = load_linear_across(x, stride, rows, n_rows, tile - PAIRS, K)
        if WEIGHTED:
            across *= scale[None, :]
        across = across.to(values.dtype)
    else:
        if SLICES > 2:  # the last group may be incomplete: its last tile is computed again and not stored
            tile = tl.minimum(tile, PAIRS - 1)
        a, b = pair_of(tile, SLICES)
        if SLICES > 2:
            xa = load_slice_across(x, stride, rows, n_rows, a, K, not EVEN)
            xb = load_slice_across(x, stride, rows, n_rows, b, K, not EVEN)
        else:
            xa = x0 if a == 0 else x1
            xb = x0 if b == 0 else x1
        xb_lo = None
        if WEIGHTED:
            scaled = xb * scale[None, :]
            if HI_LO:
                xb = rounded(scaled, values.dtype)
                xb_lo = (scaled - xb).to(values.dtype)
                xb = xb.to(values.dtype)
        if WEIGHTED and not HI_LO:  # one rounding of a product of three factors
            across = outer_across(xa, scaled, BT, tl.float32).to(values.dtype)
        else:
            across = outer_across(xa, xb, BT, values.dtype)
        if HI_LO:
            across_lo = outer_lo_across(xa, xb, xb_lo, across, BT)
            acc = tl.dot(across_lo, values, acc)
            z = tl.dot(across_lo, ones, z)
    acc = tl.dot(across, values, acc, input_precision=PRECISION)
    z = tl.dot(across, ones, z, input_precision=PRECISION)
    return acc, z


@triton.jit
def _weights(feature, tile, c0, c1, c2, K: tl.constexpr, SLICES: tl.constexpr, PAIRS: tl.constexpr,
             LOW: tl.constexpr):  # fmt: skip
    """The weights of these features, all of one tile, on the query side."""
    if LOW and tile >= PAIRS:
        linear = feature - PAIRS * TILE
        w = tl.where(linear < K, c1, tl.where(linear == K, c0, 0.0))
    else:
        a, b = pair_of(tile, SLICES)
        w = feature * 0.0 + tl.where(a < b, 2.0 * c2, c2)
    return w


@triton.jit
def _store_tile(acc, z, kv_to, z_to, tile, VP: tl.constexpr):
    """Stores a feature tile [64, VP] and [64, 16], summed over its columns, into a state."""
    f = tl.arange(0, TILE) + tile * TILE
    tl.store(kv_to + (f[:, None] * VP + tl.arange(0, VP)[None, :]), acc)
    tl.store(z_to + f, tl.sum(z, 1))


@triton.jit(do_not_specialize=["chunks_per_sequence"])
def chunk_sums_kernel(
    x, y, scale, weight, kv, z,
    cu_seqlens, first_chunk, owner,
    x_batch, x_token, x_head, y_batch, y_token, y_head,
    T, H, chunks_per_sequence,
    K: tl.constexpr, V: tl.constexpr, VP: tl.constexpr,
    SLICES: tl.constexpr, PAIRS: tl.constexpr, TILES: tl.constexpr, GROUP: tl.constexpr,
    CHUNK: tl.constexpr, BT: tl.constexpr,
    WEIGHTED: tl.constexpr, HI_LO: tl.constexpr, BACKWARD: tl.constexpr, ALL: tl.constexpr, PACKED: tl.constexpr,
    EVEN: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr, K_UNIT: tl.constexpr, V_UNIT: tl.constexpr,
):  # fmt: skip
    """kv [chunks, H, F, VP] and z [chunks, H, F]: sums over the tokens of a chunk of phi(x)^T [y, 1]. If not ALL, the
    last chunk in time is left out: no running total needs it.

    WEIGHTED: phi is multiplied by `scale` [B, H, T], and `weight` [B, H, T] (if not None) replaces the 1. HI_LO:
    features x_i x_j go in as two bf16 numbers. A program takes GROUP of the TILES feature tiles (at most four), so that
    x and y are read once for all of them. What the running totals read first is written last: it may still be in the
    cache then.
    """
    pid = tl.program_id(0)
    if not BACKWARD:
        pid = tl.num_programs(0) - 1 - pid
    h = pid % H
    chunk = pid // H
    _, row, inside, start, length = locate(chunk, cu_seqlens, first_chunk, owner, T, chunks_per_sequence, PACKED)
    if not ALL:
        last = inside == 0 if BACKWARD else (inside + 1) * CHUNK >= length
        if last:
            return
    x = find_head(x, row, start, h, x_batch, x_token, x_head, K_UNIT)
    y = find_head(y, row, start, h, y_batch, y_token, y_head, V_UNIT)
    if WEIGHTED:
        scale += (row * H + h) * T + start
        if weight is not None:
            weight += (row * H + h) * T + start
    LOW: tl.constexpr = TILES > PAIRS
    if GROUP == TILES:
        tile: tl.constexpr = 0
    else:
        tile = tl.program_id(1) * GROUP
    HALF: tl.constexpr = y.dtype.element_ty == tl.bfloat16
    dtype: tl.constexpr = tl.bfloat16 if HALF else tl.float32

    acc0 = tl.zeros([TILE, VP], tl.float32)
    z0 = tl.zeros([TILE, 16], tl.float32)
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
            if weight is not None:
                ones = tl.load(weight + rows, mask=rows < length, other=0.0)
        ones_hi = rounded(ones, dtype)
        ones = tl.where(column == 0, ones_hi[:, None], tl.where(column == 1, (ones - ones_hi)[:, None], 0.0)).to(dtype)
        x0 = load_slice_across(x, x_token, rows, length, 0, K, not EVEN)
        x1 = x0
        if SLICES == 2:
            x1 = load_slice_across(x, x_token, rows, length, 1, K, not EVEN)
        acc0, z0 = _add_tile(acc0, z0, x, x_token, factor, rows, length, x0, x1, values, ones, tile, WEIGHTED,
                              HI_LO, K, SLICES, PAIRS, LOW, BT, EVEN, PRECISION)  # fmt: skip
        if GROUP > 1:
            acc1, z1 = _add_tile(acc1, z1, x, x_token, factor, rows, length, x0, x1, values, ones, tile + 1, WEIGHTED,
                                  HI_LO, K, SLICES, PAIRS, LOW, BT, EVEN, PRECISION)  # fmt: skip
        if GROUP > 2:
            acc2, z2 = _add_tile(acc2, z2, x, x_token, factor, rows, length, x0, x1, values, ones, tile + 2, WEIGHTED,
                                  HI_LO, K, SLICES, PAIRS, LOW, BT, EVEN, PRECISION)  # fmt: skip
        if GROUP > 3:
            acc3, z3 = _add_tile(acc3, z3, x, x_token, factor, rows, length, x0, x1, values, ones, tile + 3, WEIGHTED,
                                  HI_LO, K, SLICES, PAIRS, LOW, BT, EVEN, PRECISION)  # fmt: skip

    to = (chunk.to(tl.int64) * H + h) * (TILES * TILE)
    kv += to * VP
    z += to
    _store_tile(acc0, z0, kv, z, tile, VP)
    if GROUP > 1 and tile + 1 < TILES:
        _store_tile(acc1, z1, kv, z, tile + 1, VP)
    if GROUP > 2 and tile + 2 < TILES:
        _store_tile(acc2, z2, kv, z, tile + 2, VP)
    if GROUP > 3 and tile + 3 < TILES:
        _store_tile(acc3, z3, kv, z, tile + 3, VP)


@triton.jit
def _run(sums, initial, totals, final, w, offset, sequence, begin, count, H, h,
         SIZE: tl.constexpr, HAS_INITIAL: tl.constexpr, WANT_FINAL: tl.constexpr, BACKWARD: tl.constexpr,
         STAGES: tl.constexpr):  # fmt: skip
    """Stores the running totals of the numbers at `offset` in the states of one sequence and head (SIZE numbers)."""
    ends = (sequence.to(tl.int64) * H + h) * SIZE + offset
    total = w * 0.0
    if HAS_INITIAL:
        start = tl.load(initial + ends)
    else:
        start = total
    for step in tl.range(0, count, num_stages=STAGES):  # only `final` needs the last sum, which may be missing
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


@triton.jit
def _run_faded(sums, initial, totals, final, w, offset, sequence, begin, count, H, h, ends, states, shares, spans,
               SIZE: tl.constexpr, HAS_INITIAL: tl.constexpr, WANT_FINAL: tl.constexpr, BACKWARD: tl.constexpr,
               STAGES: tl.constexpr):  # fmt: skip
    """_run with a gate: a total is multiplied by the decay of each chunk that it passes.

    BACKWARD: also stores into `shares` (at this program's place of `spans` per chunk) what these numbers add to the
    product of each state, decayed by its chunk, with the gradient of the state after the chunk."""
    place = (sequence.to(tl.int64) * H + h) * SIZE + offset
    total = w * 0.0
    if HAS_INITIAL:
        total = tl.load(initial + place)
    for step in tl.range(0, count, num_stages=STAGES):
        if BACKWARD:
            chunk = begin + count - 1 - step
            out = total
        else:
            chunk = begin + step
            out = w * total
        here = chunk.to(tl.int64) * H + h
        at = here * SIZE + offset
        tl.store(totals + at, out.to(totals.dtype.element_ty))
        fade = tl.exp2(tl.load(ends + here).to(tl.float32))
        if WANT_FINAL:
            more = tl.load(sums + at)
        else:
            more = tl.load(sums + at, mask=(offset >= 0) & (step + 1 < count), other=0.0)
        if BACKWARD:
            bare = tl.load(states + at).to(tl.float32) * tl.where(w == 0.0, 0.0, 1.0 / tl.where(w == 0.0, 1.0, w))
            tl.store(shares + here * spans, fade * tl.sum(bare * out, 0))
            more = w * more
        total = fade * total + more
    if WANT_FINAL:
        tl.store(final + place, total)


@triton.jit(do_not_specialize=["chunks_per_sequence"])
def running_totals_kernel(
    kv_sums, z_sums, kv_initial, z_initial, kv, z, kv_final, z_final,
    first_chunk, ends, kv_states, z_states, shares,
    c0, c1, c2,
    H, chunks_per_sequence,
    K: tl.constexpr, VP: tl.constexpr, SLICES: tl.constexpr, PAIRS: tl.constexpr, TILES: tl.constexpr,
    HAS_INITIAL: tl.constexpr, WANT_FINAL: tl.constexpr, BACKWARD: tl.constexpr, PACKED: tl.constexpr,
    SPAN: tl.constexpr, STAGES: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Exclusive running totals over the chunks of each sequence, multiplied by the weights of the features.

    Forward:   totals[c] = w * (initial + sums before c), final = initial + all sums.
    BACKWARD:  totals[c] = initial + w * (sums after c),  final = initial + w * all sums: the gradient of a state.
    A program takes SPAN numbers of kv (all of one feature tile), or one tile of z, of one sequence and head.
    GATED: sums fade with the chunks that follow (BACKWARD: that precede); ends and shares are those of gate.py, and
    kv_states and z_states the totals of the forward pass.
    """
    SPANS: tl.constexpr = TILES * TILE * VP // SPAN + TILES
    span = tl.program_id(0) % SPANS
    pid = tl.program_id(0) // SPANS
    if BACKWARD:
        pid = tl.num_programs(0) // SPANS - 1 - pid
    sequence = pid // H
    h = pid % H
    if PACKED:
        begin = tl.load(first_chunk + sequence)
        count = tl.load(first_chunk + sequence + 1) - begin
    else:
        begin = sequence * chunks_per_sequence
        count = chunks_per_sequence
    F: tl.constexpr = TILES * TILE
    LOW: tl.constexpr = TILES > PAIRS
    if span < F * VP // SPAN:
        offset = span * SPAN + tl.arange(0, SPAN)
        w = _weights(offset // VP, span * SPAN // (TILE * VP), c0, c1, c2, K, SLICES, PAIRS, LOW)
        if GATED:
            _run_faded(kv_sums, kv_initial, kv, kv_final, w, offset, sequence, begin, count, H, h, ends, kv_states,
                       shares + span if BACKWARD else shares, SPANS, F * VP,
                       HAS_INITIAL, WANT_FINAL, BACKWARD, STAGES)  # fmt: skip
        else:
            _run(kv_sums, kv_initial, kv, kv_final, w, offset, sequence, begin, count, H, h, F * VP,
                 HAS_INITIAL, WANT_FINAL, BACKWARD, STAGES)  # fmt: skip
    else:
        tile = span - F * VP // SPAN
        f = tl.arange(0, TILE) + tile * TILE
        z_w = _weights(f, tile, c0, c1, c2, K, SLICES, PAIRS, LOW)
        if GATED:
            _run_faded(z_sums, z_initial, z, z_final, z_w, f, sequence, begin, count, H, h, ends, z_states,
                       shares + span if BACKWARD else shares, SPANS, F,
                       HAS_INITIAL, WANT_FINAL, BACKWARD, STAGES)  # fmt: skip
        else:
            _run(z_sums, z_initial, z, z_final, z_w, f, sequence, begin, count, H, h, F,
                 HAS_INITIAL, WANT_FINAL, BACKWARD, STAGES)  # fmt: skip


@triton.jit
def find_state(sequence, chunk, first_chunk, chunks_per_sequence, H, h, F: tl.constexpr, PACKED: tl.constexpr):
    """The offset of the running total of a chunk, counted in features."""
    if PACKED:
        chunk += tl.load(first_chunk + sequence)
    else:
        chunk += sequence * chunks_per_sequence
    return (chunk.to(tl.int64) * H + h) * F
