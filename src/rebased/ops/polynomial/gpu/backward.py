"""Gradients, in two kernels: for a tile of queries against its keys, and for a tile of keys against its queries.

With delta_i = -(do_i . o_i), the gradient at sim_ij is (do_i . v_j + delta_i) / den_i. With a gate (gate.py),
both kernels also sum that gradient times sim_ij: over the keys of a query, and over the queries of a key.
"""

import triton
import triton.language as tl

from rebased.ops.polynomial.gpu.features import (
    SLICE,
    TILE,
    add_product,
    as_factor,
    find_head,
    fold,
    fold_linear,
    half_slope,
    in_score_order,
    load_linear,
    load_numbers,
    load_rows,
    load_slice,
    locate_tile,
    outer,
    outer_lo,
    pair_of,
    positions,
    rounded,
    score_positions,
    similarity,
)
from rebased.ops.polynomial.gpu.forward import EARLY, find_o_lo
from rebased.ops.polynomial.gpu.gate import decay_between, divisor, key_decays, own_decays, split_power, sums_since
from rebased.ops.polynomial.gpu.states import find_state


@triton.jit
def _against_z(x, dtype: tl.constexpr):
    """x [rows] as [rows, 16], to be multiplied with the z of _load_state: in half precision, three products."""
    column = tl.arange(0, 16)[None, :]
    x_hi = rounded(x, dtype)
    return tl.where(column < 2, x_hi[:, None], tl.where(column == 2, (x - x_hi)[:, None], 0.0)).to(dtype)


@triton.jit
def _load_state(kv, z, tile, VP: tl.constexpr):
    """S [64, VP] and z [64, 16] of one feature tile."""
    f = tl.arange(0, TILE) + tile * TILE
    state = tl.load(kv + (f[:, None] * VP + tl.arange(0, VP)[None, :]))
    column = tl.arange(0, 16)[None, :]
    x = tl.load(z + f)
    x_hi = rounded(x, state.dtype)
    zs = tl.where(column == 1, (x - x_hi)[:, None], tl.where(column < 3, x_hi[:, None], 0.0))
    return state, zs.to(state.dtype)


@triton.jit
def _feature_grad(y, weight, state, zs, PRECISION: tl.constexpr):
    """[rows, 64]: the gradient y S^T + weight z^T at a feature tile."""
    grad = tl.dot(y, tl.trans(state), input_precision=PRECISION)
    return tl.dot(weight, tl.trans(zs), grad, input_precision=PRECISION)


@triton.jit
def _pair_from_state(dx, dv, y, weight, xa, xb, a, b, kv, z, tile, BOTH: tl.constexpr,
                     VALUES: tl.constexpr, VP: tl.constexpr, ROWS: tl.constexpr, SLOTS: tl.constexpr,
                     PRECISION: tl.constexpr, dtype: tl.constexpr, power=None):  # fmt: skip
    """dx and dv plus what the feature tile (a, b) sends to slice b and, if BOTH, to slice a; else a = b, twice."""
    state, zs = _load_state(kv, z, tile, VP)
    grad = _feature_grad(y, weight, state, zs, PRECISION)
    if VALUES:
        xc = xb
        if power is not None:
            xc = (xb * power).to(dtype)
        phi = outer(xa, xc, ROWS, dtype)
        dv = tl.dot(phi, state, dv, input_precision=PRECISION)
        if dtype == tl.bfloat16:
            dv = tl.dot(outer_lo(xa, xc, phi, ROWS), state, dv, input_precision=PRECISION)
    xa, xb = xa.to(tl.float32), xb.to(tl.float32)
    if BOTH:
        dx = fold(dx, grad, xa, 1, b, ROWS, SLOTS)
        dx = fold(dx, grad, xb, 2, a, ROWS, SLOTS)
    else:
        dx = fold(dx, grad, 2.0 * xa, 1, b, ROWS, SLOTS)
    return dx, dv


@triton.jit
def _from_state(dv, y, weight, x, stride, rows, length, kv, z, VALUES: tl.constexpr,
                K: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr, SLICES: tl.constexpr, PAIRS: tl.constexpr,
                TILES: tl.constexpr, ROWS: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
                dtype: tl.constexpr, FORMS: tl.constexpr = False, power=None):  # fmt: skip
    """The gradient [rows, KP] at x (queries or keys) of sum_i phi(x_i) . (S y_i + z weight_i), where S is symmetric in
    the two factors; and, if VALUES, dv plus phi(x) S, the gradient at y. `weight` comes from _against_z. If FORMS, also
    the terms of that sum [rows]: squares are half of x times their gradient, the others are summed here. power: of two,
    a factor of phi(x) where that is multiplied with S."""
    SLOTS: tl.constexpr = KP // SLICE
    if FORMS:
        forms = tl.zeros([ROWS], tl.float32)
    dx = tl.zeros([ROWS, SLOTS, SLICE], tl.float32)
    if SLICES <= 2:
        x0 = load_slice(x, stride, rows, length, 0, K, not EVEN)
        dx, dv = _pair_from_state(dx, dv, y, weight, x0, x0, 0, 0, kv, z, 0, False, VALUES,
                                  VP, ROWS, SLOTS, PRECISION, dtype, power)  # fmt: skip
        if SLICES == 2:
            x1 = load_slice(x, stride, rows, length, 1, K, not EVEN)
            dx, dv = _pair_from_state(dx, dv, y, weight, x0, x1, 0, 1, kv, z, 1, True, VALUES,
                                      VP, ROWS, SLOTS, PRECISION, dtype, power)  # fmt: skip
            dx, dv = _pair_from_state(dx, dv, y, weight, x1, x1, 1, 1, kv, z, 2, False, VALUES,
                                      VP, ROWS, SLOTS, PRECISION, dtype, power)  # fmt: skip
    else:
        for tile in range(PAIRS):
            a, b = pair_of(tile, SLICES)
            xa = load_slice(x, stride, rows, length, a, K, not EVEN)
            xb = load_slice(x, stride, rows, length, b, K, not EVEN)
            dx, dv = _pair_from_state(dx, dv, y, weight, xa, xb, a, b, kv, z, tile, True, VALUES,
                                      VP, ROWS, SLOTS, PRECISION, dtype, power)  # fmt: skip
    for step in tl.static_range(TILES - PAIRS):
        state, zs = _load_state(kv, z, step + PAIRS, VP)
        grad = _feature_grad(y, weight, state, zs, PRECISION)
        dx = fold_linear(dx, grad, step, ROWS, K, SLOTS)
        if VALUES:
            phi = load_linear(x, stride, rows, length, step, K).to(dtype)
            if power is not None:
                phi = (phi * power).to(dtype)
            dv = tl.dot(phi, state, dv, input_precision=PRECISION)
        if FORMS:
            f = tl.arange(0, TILE) + step * TILE
            linear = load_linear(x, stride, rows, length, step, K) * tl.where(f < K, 0.5, 1.0)[None, :]
            forms += tl.sum(grad * linear, 1)
    dx = tl.reshape(dx, [ROWS, KP])
    if FORMS:
        forms += 0.5 * tl.sum(dx * load_rows(x, stride, rows, length, K, KP, not EVEN).to(tl.float32), 1)
        return dx, dv, forms
    else:
        return dx, dv


@triton.jit
def as_multiplied(x, PRECISION: tl.constexpr):
    """x as the tensor cores read it. In TF32 they ignore the last 13 bits, and delta must ignore them too: with a
    single value, do . o has to cancel do . v, however small the similarity is."""
    if PRECISION == "tf32" and x.dtype == tl.float32:
        return (x.to(tl.int32, bitcast=True) & -0x2000).to(tl.float32, bitcast=True)
    else:
        return x


@triton.jit
def add_query_grad(dq, queries, grads, delta, k, k_token, v, v_token, n, rows, length, c1, c2,
                   K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr, VP: tl.constexpr, BM: tl.constexpr,
                   BN: tl.constexpr, DIAGONAL: tl.constexpr, HI_LO: tl.constexpr, LOW: tl.constexpr,
                   EVEN: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr, dtype: tl.constexpr,
                   gate=None, until=None, sums=None, c0=None, GATE: tl.constexpr = 0):  # fmt: skip
    """dq plus half of what the keys n .. n+BN send, without the scale of each query. HI_LO, also on the diagonal: where
    dq loses digits through states too, gradients at scores are multiplied as hi and lo. With a gate also sums [rows]
    plus the gradients at similarities times these; if not LOW, without c2."""
    columns = score_positions(n, BN, WIDE, dtype)
    keys = load_rows(k, k_token, positions(n, BN, WIDE), length, K, KP, DIAGONAL and not EVEN)
    values = load_rows(v, v_token, columns, length, V, VP, DIAGONAL and not EVEN)
    s = tl.dot(queries, tl.trans(in_score_order(keys, dtype)), input_precision=PRECISION)
    ds = tl.dot(grads, tl.trans(values.to(dtype)), input_precision=PRECISION) + delta[:, None]
    if DIAGONAL and not LOW:
        s = tl.where(rows[:, None] >= columns[None, :], s, 0.0)
    if gate is not None and LOW:
        raw = ds
    ds *= half_slope(s, c1, c2, LOW)
    if DIAGONAL and LOW:
        ds = tl.where(rows[:, None] >= columns[None, :], ds, 0.0)
    if gate is not None:
        decays = key_decays(gate, until, n, columns, length, GATE, BM, DIAGONAL)
        ds *= decays
        if LOW:
            if DIAGONAL:
                raw = tl.where(rows[:, None] >= columns[None, :], raw, 0.0)
            sums += tl.sum(raw * decays * similarity(s, c0, c1, c2, LOW), 1)
        else:
            sums += tl.sum(ds * s, 1)
        return add_product(dq, as_factor(ds, dtype), keys, HI_LO, PRECISION, dtype), sums
    else:
        return add_product(dq, as_factor(ds, dtype), keys, HI_LO, PRECISION, dtype)


@triton.jit(do_not_specialize=["tiles_per_sequence", "chunks_per_sequence", "chunk_length"])
def query_grad_kernel(
    q, k, v, o, o_lo, do, inverse, dq, deltas, kv, z,
    cu_seqlens, first_tile, owner, first_chunk, local, local_lo, until, base, row_sums, faded, faded_sums,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head, do_batch, do_token, do_head,
    T, H, tiles_per_sequence, chunks_per_sequence, chunk_length,
    c0, c1, c2,
    K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr, VP: tl.constexpr,
    SLICES: tl.constexpr, PAIRS: tl.constexpr, TILES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    LOW: tl.constexpr, HAS_STATES: tl.constexpr, HAS_INITIAL: tl.constexpr, PACKED: tl.constexpr, EVEN: tl.constexpr,
    WIDE: tl.constexpr, PRECISION: tl.constexpr, K_UNIT: tl.constexpr, V_UNIT: tl.constexpr, LO_LIKE_O: tl.constexpr,
    GATE: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """dq [B, T, H, K], and deltas [B, H, T] = -(do . o) for the next kernels; o_lo as in forward.py.

    GATED: also row_sums [B, H, T] (gate.py), and `inverse` times the decay from the first token of its tile of GATE
    (faded) and, if HAS_STATES, from that of its chunk (faded_sums)."""
    h, sequence, row, start, length, first = locate_tile(
        cu_seqlens, first_tile, owner, T, H, tiles_per_sequence, BM, PACKED
    )
    if first >= length:
        return
    q = find_head(q, row, start, h, q_batch, q_token, q_head, K_UNIT)
    k = find_head(k, row, start, h, k_batch, k_token, k_head, K_UNIT)
    v = find_head(v, row, start, h, v_batch, v_token, v_head, V_UNIT)
    do = find_head(do, row, start, h, do_batch, do_token, do_head, V_UNIT)
    HALF: tl.constexpr = v.dtype.element_ty == tl.bfloat16
    dtype: tl.constexpr = tl.bfloat16 if HALF else tl.float32

    rows = positions(first, BM, WIDE)
    here = (row * T + start) * H + h
    scalars = (row * H + h) * T + start
    scale = tl.load(inverse + scalars + rows, mask=rows < length, other=0.0)
    grads = as_multiplied(load_rows(do, do_token, rows, length, V, VP, not EVEN), PRECISION)
    outputs = load_rows(o + here * V, H * V, rows, length, V, VP, not EVEN).to(tl.float32)
    if o_lo is not None and first < EARLY:
        o_lo, stride = find_o_lo(o_lo, here, sequence, H, h, V, LO_LIKE_O)
        kept = length if BM <= EARLY else tl.minimum(length, EARLY)
        outputs += load_rows(o_lo, stride, rows, kept, V, VP, BM > EARLY or not EVEN).to(tl.float32)
    delta = -tl.sum(grads.to(tl.float32) * outputs, 1)
    tl.store(deltas + scalars + rows, delta, mask=rows < length)
    grads = grads.to(dtype)
    queries = load_rows(q, q_token, rows, length, K, KP, not EVEN)
    acc = tl.zeros([BM, KP], tl.float32)
    chunk = first // chunk_length
    DIAGONAL_STEP: tl.constexpr = BM if BM <= 2 * BN else BN
    if GATED:
        local += scalars
        if local_lo is not None:
            local_lo += scalars
        until += scalars
        base += scalars
        origin = tl.load(base + first)
        sums, sums_lo = sums_since(local, local_lo, base, origin, rows, length, GATE, BM)
        gate = (sums, origin, local, base)
        if local_lo is not None:
            gate = (sums, origin, local, base, sums_lo, local_lo)
        fade = divisor(tl.exp2(sums))
        found = tl.zeros([BM], tl.float32)
    for n in range(0, BM, DIAGONAL_STEP):
        for step in tl.static_range(DIAGONAL_STEP // BN):
            if GATED:
                acc, found = add_query_grad(acc, queries, grads, delta, k, k_token, v, v_token, first + n + step * BN,
                                            rows, length, c1, c2,
                                            K, KP, V, VP, BM, BN, True, True, LOW, EVEN, WIDE, PRECISION, dtype,
                                            gate, until, found, c0, GATE)  # fmt: skip
            else:
                acc = add_query_grad(acc, queries, grads, delta, k, k_token, v, v_token, first + n + step * BN, rows,
                                     length, c1, c2,
                                     K, KP, V, VP, BM, BN, True, True, LOW, EVEN, WIDE, PRECISION, dtype)  # fmt: skip
    if GATED:
        acc *= (1.0 / fade)[:, None]
        found *= 1.0 / fade
        for n in range(chunk * chunk_length, first, BN):
            acc, found = add_query_grad(acc, queries, grads, delta, k, k_token, v, v_token, n, rows, length, c1, c2,
                                        K, KP, V, VP, BM, BN, False, HAS_STATES, LOW, EVEN, WIDE, PRECISION, dtype,
                                        gate, until, found, c0, GATE)  # fmt: skip
        acc *= fade[:, None]
        found *= fade
    else:
        for n in range(chunk * chunk_length, first, BN):
            acc = add_query_grad(acc, queries, grads, delta, k, k_token, v, v_token, n, rows, length, c1, c2,
                                 K, KP, V, VP, BM, BN, False, HAS_STATES, LOW, EVEN, WIDE, PRECISION,
                                 dtype)  # fmt: skip
    acc *= 2.0 if LOW else 2.0 * c2
    if GATED and not LOW:
        found *= c2
    if HAS_STATES and (HAS_INITIAL or chunk > 0):
        state = find_state(sequence, chunk, first_chunk, chunks_per_sequence, H, h, TILES * TILE, PACKED)
        weight = _against_z(delta, dtype)
        if GATED:
            more, _, forms = _from_state(acc, grads, weight, q, q_token, rows, length, kv + state * VP, z + state,
                                         False, K, KP, VP, SLICES, PAIRS, TILES, BM, EVEN, PRECISION, dtype,
                                         True)  # fmt: skip
            since = tl.exp2(sums + origin.to(tl.float32))
            more *= since[:, None]
            found += since * forms
        else:
            more, _ = _from_state(acc, grads, weight, q, q_token, rows, length, kv + state * VP, z + state, False,
                                  K, KP, VP, SLICES, PAIRS, TILES, BM, EVEN, PRECISION, dtype)  # fmt: skip
        acc += more
    if GATED:
        tl.store(row_sums + scalars + rows, scale * found, mask=rows < length)
        own = load_numbers(local, rows, length, True)
        tl.store(faded + scalars + rows, scale * tl.exp2(own), mask=rows < length)
        if HAS_STATES:
            since = tl.exp2(sums + origin.to(tl.float32))
            tl.store(faded_sums + scalars + rows, scale * since, mask=rows < length)
    acc *= scale[:, None]
    columns = tl.arange(0, KP)
    tl.store(
        dq + here * K + (rows[:, None] * (H * K) + columns[None, :]),
        acc.to(dq.dtype.element_ty),
        mask=(rows < length)[:, None] & (columns < K)[None, :],
    )


@triton.jit
def add_key_grad(dk, dv, keys, values, q, q_token, do, do_token, inverse, deltas, m, columns, length, c0, c1, c2,
                 K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr, VP: tl.constexpr, BM: tl.constexpr,
                 BN: tl.constexpr, DIAGONAL: tl.constexpr, LOW: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr,
                 PRECISION: tl.constexpr, dtype: tl.constexpr, at=None, gate=None, fade=None, sums=None,
                 GATE: tl.constexpr = 0):  # fmt: skip
    """dk plus half, and dv plus all, of what the queries m .. m+BM send. Scores are transposed: [keys, queries].
    at: the position of each query, where that is not its number.

    The scale of a query is multiplied into its scores in bf16, where dk and dv depend on how these are rounded. In
    TF32 it is multiplied into the query and its gradient, which have fewer numbers.

    With a gate also sums [keys] plus the gradients at similarities times these. The scale of a query before which keys
    have faded includes that decay, times `fade`."""
    rows = positions(m, BM, WIDE)
    queries = load_rows(q, q_token, rows, length, K, KP, not EVEN)
    grads = load_rows(do, do_token, rows, length, V, VP, not EVEN).to(dtype)
    rows = score_positions(m, BM, WIDE, dtype)
    delta = load_numbers(deltas, rows, length, not EVEN)
    where = rows
    if at is not None:
        where = tl.load(at + rows, mask=rows < length, other=-1)
    s = tl.dot(keys, tl.trans(in_score_order(queries, dtype)), input_precision=PRECISION)
    ds = tl.dot(values, tl.trans(in_score_order(grads, dtype)), input_precision=PRECISION) + delta[None, :]
    if DIAGONAL and not LOW:
        s = tl.where(where[None, :] >= columns[:, None], s, 0.0)
    if dtype == tl.float32:
        slope = half_slope(s, c1, c2, LOW)
        sim = similarity(s, c0, c1, c2, LOW)
    else:
        scale = load_numbers(inverse, rows, length, not EVEN)
        if fade is not None:
            scale *= fade
        slope = (c2 * scale)[None, :] * s
        if LOW:
            sim = (c0 * scale)[None, :] + s * ((c1 * scale)[None, :] + slope)
            slope += (0.5 * c1 * scale)[None, :]
        else:
            sim = slope * s
    if gate is not None:
        raw = ds
    ds *= slope
    if DIAGONAL and LOW:
        seen = where[None, :] >= columns[:, None]
        sim = tl.where(seen, sim, 0.0)
        ds = tl.where(seen, ds, 0.0)
    if gate is not None:
        if DIAGONAL:
            decays = own_decays(gate, rows, length, GATE, BN, True)
            sim *= decays
            ds *= decays
        raw *= sim
        if dtype == tl.float32:
            scale = load_numbers(inverse, rows, length, not EVEN)
            raw *= (scale if LOW else c2 * scale)[None, :]
            sums += tl.sum(raw, 1) if fade is None else fade * tl.sum(raw, 1)
        else:
            sums += tl.sum(raw, 1)
    if dtype == tl.float32:
        scale = load_numbers(inverse, positions(m, BM, WIDE), length, not EVEN)
        if not LOW:
            scale *= c2
        if fade is not None:
            scale *= fade
        queries = scale[:, None] * queries
        grads = scale[:, None] * grads
    dv = add_product(dv, as_factor(sim, dtype), grads, DIAGONAL, PRECISION, dtype)
    dk = add_product(dk, as_factor(ds, dtype), queries, DIAGONAL, PRECISION, dtype)
    if gate is not None:
        return dk, dv, sums
    else:
        return dk, dv


@triton.jit(do_not_specialize=["tiles_per_sequence", "chunks_per_sequence", "chunk_length"])
def key_grad_kernel(
    q, k, v, do, inverse, deltas, dk, dv, kv, z,
    cu_seqlens, first_tile, owner, first_chunk, local, local_lo, until, base, ends, faded, column_sums, past_sums,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head, do_batch, do_token, do_head,
    T, H, tiles_per_sequence, chunks_per_sequence, chunk_length,
    c0, c1, c2,
    K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr, VP: tl.constexpr,
    SLICES: tl.constexpr, PAIRS: tl.constexpr, TILES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    LOW: tl.constexpr, HAS_STATES: tl.constexpr, HAS_FINAL: tl.constexpr, PACKED: tl.constexpr, EVEN: tl.constexpr,
    WIDE: tl.constexpr, PRECISION: tl.constexpr, K_UNIT: tl.constexpr, V_UNIT: tl.constexpr,
    GATE: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """dk [B, T, H, K] and dv [B, T, H, V] for BN keys of one head; kv and z are the gradients of the states after.

    GATED: what comes after the tile fades with each key (gate.py). Also column_sums [B, H, T], and past_sums if
    HAS_STATES. faded is that of query_grad_kernel."""
    h, sequence, row, start, length, first = locate_tile(
        cu_seqlens, first_tile, owner, T, H, tiles_per_sequence, BN, PACKED
    )
    if first >= length:
        return
    q = find_head(q, row, start, h, q_batch, q_token, q_head, K_UNIT)
    k = find_head(k, row, start, h, k_batch, k_token, k_head, K_UNIT)
    v = find_head(v, row, start, h, v_batch, v_token, v_head, V_UNIT)
    do = find_head(do, row, start, h, do_batch, do_token, do_head, V_UNIT)
    here = (row * T + start) * H + h
    inverse += (row * H + h) * T + start
    deltas += (row * H + h) * T + start
    HALF: tl.constexpr = v.dtype.element_ty == tl.bfloat16
    dtype: tl.constexpr = tl.bfloat16 if HALF else tl.float32

    columns = positions(first, BN, WIDE)
    keys = load_rows(k, k_token, columns, length, K, KP, not EVEN)
    values = load_rows(v, v_token, columns, length, V, VP, not EVEN).to(dtype)
    acc_k = tl.zeros([BN, KP], tl.float32)
    acc_v = tl.zeros([BN, VP], tl.float32)
    chunk = first // chunk_length
    end = tl.minimum((chunk + 1) * chunk_length, length)
    DIAGONAL_STEP: tl.constexpr = BN if BN <= 2 * BM else BM
    if GATED:
        scalars = (row * H + h) * T + start
        local += scalars
        if local_lo is not None:
            local_lo += scalars
        until += scalars
        base += scalars
        faded += scalars
        origin = tl.load(base + first)
        sums, sums_lo = sums_since(local, local_lo, base, origin, columns, length, GATE, BN)
        gate = (sums, origin, local, base)
        if local_lo is not None:
            gate = (sums, origin, local, base, sums_lo, local_lo)
        found = tl.zeros([BN], tl.float32)
        own = find_state(sequence, chunk, first_chunk, chunks_per_sequence, H, h, 1, PACKED)
        total = tl.load(ends + own)
        after = tl.where(first + BN < end, tl.load(base + first + BN, mask=first + BN < end, other=0.0), total)
        fade = load_numbers(until, columns, length, True)
        if BN > GATE:
            next_tile = (columns // GATE + 1) * GATE
            inside = next_tile < tl.minimum(first + BN, end)
            fade *= decay_between(after, tl.where(inside, tl.load(base + next_tile, mask=inside, other=0.0), after))
        fade = divisor(fade)
    for m in range(0, BN, DIAGONAL_STEP):
        for step in tl.static_range(DIAGONAL_STEP // BM):
            if GATED:
                acc_k, acc_v, found = add_key_grad(acc_k, acc_v, keys, values, q, q_token, do, do_token, inverse,
                                                   deltas, first + m + step * BM, columns, length, c0, c1, c2,
                                                   K, KP, V, VP, BM, BN, True, LOW, EVEN, WIDE, PRECISION, dtype,
                                                   None, gate, None, found, GATE)  # fmt: skip
            else:
                acc_k, acc_v = add_key_grad(acc_k, acc_v, keys, values, q, q_token, do, do_token, inverse, deltas,
                                         first + m + step * BM, columns, length, c0, c1, c2,
                                         K, KP, V, VP, BM, BN, True, LOW, EVEN, WIDE, PRECISION, dtype)  # fmt: skip
    if GATED:
        acc_k *= (1.0 / fade)[:, None]
        acc_v *= (1.0 / fade)[:, None]
        found *= 1.0 / fade
        for m in range(first + BN, end, BM):
            between = decay_between(tl.load(base + m // GATE * GATE), after)
            acc_k, acc_v, found = add_key_grad(acc_k, acc_v, keys, values, q, q_token, do, do_token, faded, deltas, m,
                                               columns, length, c0, c1, c2,
                                               K, KP, V, VP, BM, BN, False, LOW, EVEN, WIDE, PRECISION, dtype,
                                               None, gate, between, found, GATE)  # fmt: skip
    else:
        for m in range(first + BN, end, BM):
            acc_k, acc_v = add_key_grad(acc_k, acc_v, keys, values, q, q_token, do, do_token, inverse, deltas, m,
                                     columns, length, c0, c1, c2,
                                     K, KP, V, VP, BM, BN, False, LOW, EVEN, WIDE, PRECISION, dtype)  # fmt: skip
    acc_k *= 2.0
    if GATED:
        past = tl.zeros([BN], tl.float32)
        if HAS_STATES and (HAS_FINAL or end < length):
            state = find_state(sequence, chunk, first_chunk, chunks_per_sequence, H, h, TILES * TILE, PACKED)
            ones = _against_z(tl.full([BN], 1.0, tl.float32), dtype)
            power, rest = split_power(decay_between(total, after))
            acc_v *= 1.0 / rest
            more, acc_v, past = _from_state(acc_v, values, ones, k, k_token, columns, length, kv + state * VP,
                                            z + state, True, K, KP, VP, SLICES, PAIRS, TILES, BN, EVEN, PRECISION,
                                            dtype, True, power)  # fmt: skip
            acc_k += (power * rest) * more
            acc_v *= rest
            past *= power * rest
        acc_k *= fade[:, None]
        acc_v *= fade[:, None]
        tl.store(column_sums + scalars + columns, fade * found, mask=columns < length)
        if HAS_STATES:
            tl.store(past_sums + scalars + columns, fade * past, mask=columns < length)
    elif HAS_STATES and (HAS_FINAL or end < length):
        state = find_state(sequence, chunk, first_chunk, chunks_per_sequence, H, h, TILES * TILE, PACKED)
        ones = _against_z(tl.full([BN], 1.0, tl.float32), dtype)
        more, acc_v = _from_state(acc_v, values, ones, k, k_token, columns, length, kv + state * VP, z + state, True,
                                  K, KP, VP, SLICES, PAIRS, TILES, BN, EVEN, PRECISION, dtype)  # fmt: skip
        acc_k += more
    width = tl.arange(0, KP)
    tl.store(
        dk + here * K + (columns[:, None] * (H * K) + width[None, :]),
        acc_k.to(dk.dtype.element_ty),
        mask=(columns < length)[:, None] & (width < K)[None, :],
    )
    width = tl.arange(0, VP)
    tl.store(
        dv + here * V + (columns[:, None] * (H * V) + width[None, :]),
        acc_v.to(dv.dtype.element_ty),
        mask=(columns < length)[:, None] & (width < V)[None, :],
    )
