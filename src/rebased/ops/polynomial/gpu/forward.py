"""The output of a tile of queries: squared scores with the keys of its chunk, plus phi(q) times the state before it."""

import triton
import triton.language as tl

from rebased.ops.polynomial.gpu.features import (
    TILE,
    add_product,
    as_factor,
    find_head,
    load_linear,
    load_rows,
    load_slice,
    locate_tile,
    outer,
    pair_of,
    positions,
    score_positions,
    similarity,
)
from rebased.ops.polynomial.gpu.gate import divisor, key_decays, split_power, sums_since
from rebased.ops.polynomial.gpu.states import find_state

EARLY = tl.constexpr(64)  # tokens of a sequence whose outputs are kept in full for the backward pass


@triton.jit
def find_o_lo(o_lo, at, sequence, H, h, V: tl.constexpr, LO_LIKE_O: tl.constexpr):
    """The pointer to the rounding errors of the outputs of a sequence and head, and the stride between tokens. If
    LO_LIKE_O, where EARLY rows per sequence would be more than all tokens, they are stored as o is, from `at` on."""
    if LO_LIKE_O:
        return o_lo + at * V, H * V
    else:
        return o_lo + (sequence.to(tl.int64) * H + h) * EARLY * V, V


@triton.jit
def add_keys(acc, total, queries, k, k_token, v, v_token, n, rows, length, c0, c1, c2,
              K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr, VP: tl.constexpr, BN: tl.constexpr,
              DIAGONAL: tl.constexpr, LOW: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr,
              PRECISION: tl.constexpr, dtype: tl.constexpr, gate=None, until=None,
              GATE: tl.constexpr = 0):  # fmt: skip
    """acc [rows, VP] and total [rows, 16] plus the keys n .. n+BN. Similarities are summed in column V of acc, or, if
    values fill all columns, in column 0 of total. Only on the DIAGONAL some keys come after a query."""
    columns = score_positions(n, BN, WIDE, dtype)
    keys = load_rows(k, k_token, columns, length, K, KP, DIAGONAL and not EVEN)
    values = load_rows(v, v_token, positions(n, BN, WIDE), length, V, VP, DIAGONAL and not EVEN)
    s = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
    if DIAGONAL and not LOW:
        s = tl.where(rows[:, None] >= columns[None, :], s, 0.0)
    sim = similarity(s, c0, c1, c2, LOW)
    if DIAGONAL and LOW:
        sim = tl.where(rows[:, None] >= columns[None, :], sim, 0.0)
    if gate is not None:
        sim *= key_decays(gate, until, n, columns, length, GATE, queries.shape[0], DIAGONAL)
    sim = as_factor(sim, dtype)
    # The total is a product too, of the same rounded weights as the values: a single key then gives back its value, and
    # it takes fewer instructions. As hi and lo on the diagonal, where queries with few keys have their largest weights.
    if V < VP:
        values = tl.where(tl.arange(0, VP)[None, :] == V, 1.0, values)
    else:
        first = (tl.arange(0, 16)[None, :] + tl.zeros([BN, 1], tl.int32)) == 0
        total = add_product(total, sim, first.to(dtype), DIAGONAL, PRECISION, dtype)
    acc = add_product(acc, sim, values.to(dtype), DIAGONAL, PRECISION, dtype)
    return acc, total


@triton.jit
def _add_tile(acc, total, phi, kv, z, tile, VP: tl.constexpr, PRECISION: tl.constexpr):
    """acc [rows, VP] and total [rows] plus phi S and phi z for one feature tile; S and z include the weights."""
    f = tl.arange(0, TILE) + tile * TILE
    state = tl.load(kv + (f[:, None] * VP + tl.arange(0, VP)[None, :]))
    total += tl.sum(phi.to(tl.float32) * tl.load(z + f)[None, :], 1)
    acc = tl.dot(phi, state, acc, input_precision=PRECISION)
    return acc, total


@triton.jit
def _add_state(acc, total, q, stride, rows, length, kv, z,
               K: tl.constexpr, VP: tl.constexpr, SLICES: tl.constexpr, PAIRS: tl.constexpr, TILES: tl.constexpr,
               ROWS: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr, dtype: tl.constexpr,
               power=None):  # fmt: skip
    """acc [rows, VP] and total [rows] plus phi(q) S and phi(q) z over all feature tiles. power: of two, a factor of
    phi(q)."""
    if SLICES <= 2:
        x0 = load_slice(q, stride, rows, length, 0, K, not EVEN)
        x1 = x0
        if SLICES == 2:
            x1 = load_slice(q, stride, rows, length, 1, K, not EVEN)
        y0, y1 = x0, x1
        if power is not None:
            y0, y1 = (x0 * power).to(dtype), (x1 * power).to(dtype)
        for tile in tl.static_range(PAIRS):
            a, b = pair_of(tile, SLICES)
            phi = outer(x0 if a == 0 else x1, y0 if b == 0 else y1, ROWS, dtype)
            acc, total = _add_tile(acc, total, phi, kv, z, tile, VP, PRECISION)
    else:
        for tile in range(PAIRS):
            a, b = pair_of(tile, SLICES)
            xa = load_slice(q, stride, rows, length, a, K, not EVEN)
            xb = load_slice(q, stride, rows, length, b, K, not EVEN)
            if power is not None:
                xb = (xb * power).to(dtype)
            phi = outer(xa, xb, ROWS, dtype)
            acc, total = _add_tile(acc, total, phi, kv, z, tile, VP, PRECISION)
    for step in tl.static_range(TILES - PAIRS):
        phi = load_linear(q, stride, rows, length, step, K).to(dtype)
        if power is not None:
            phi = (phi * power).to(dtype)
        acc, total = _add_tile(acc, total, phi, kv, z, step + PAIRS, VP, PRECISION)
    return acc, total


@triton.jit(do_not_specialize=["tiles_per_sequence", "chunks_per_sequence", "chunk_length"])
def forward_kernel(
    q, k, v, o, o_lo, inverse, kv, z,
    cu_seqlens, first_tile, owner, first_chunk, local, local_lo, until, base,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head,
    T, H, tiles_per_sequence, chunks_per_sequence, chunk_length,
    c0, c1, c2, eps,
    K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr, VP: tl.constexpr,
    SLICES: tl.constexpr, PAIRS: tl.constexpr, TILES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    LOW: tl.constexpr, HAS_STATES: tl.constexpr, HAS_INITIAL: tl.constexpr, PACKED: tl.constexpr, EVEN: tl.constexpr,
    WIDE: tl.constexpr, PRECISION: tl.constexpr, K_UNIT: tl.constexpr, V_UNIT: tl.constexpr, LO_LIKE_O: tl.constexpr,
    GATE: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """o [B, T, H, V] and inverse [B, H, T] = 1 / (sum of similarities + eps), for BM queries of one head.

    The backward pass divides a difference that should be zero by similarities that may be tiny. So the first EARLY
    tokens of a sequence, which have few keys, save the rounding error of o: o_lo [sequences, H, EARLY, V].

    GATED: what came before the tile fades with each query (gate.py)."""
    h, sequence, row, start, length, first = locate_tile(
        cu_seqlens, first_tile, owner, T, H, tiles_per_sequence, BM, PACKED
    )
    if first >= length:
        return
    q = find_head(q, row, start, h, q_batch, q_token, q_head, K_UNIT)
    k = find_head(k, row, start, h, k_batch, k_token, k_head, K_UNIT)
    v = find_head(v, row, start, h, v_batch, v_token, v_head, V_UNIT)
    HALF: tl.constexpr = v.dtype.element_ty == tl.bfloat16
    dtype: tl.constexpr = tl.bfloat16 if HALF else tl.float32

    rows = positions(first, BM, WIDE)
    queries = load_rows(q, q_token, rows, length, K, KP, not EVEN)
    acc = tl.zeros([BM, VP], tl.float32)
    total = tl.zeros([BM, 16], tl.float32)
    chunk = first // chunk_length
    DIAGONAL_STEP: tl.constexpr = BM if BM <= 2 * BN else BN
    gate = None
    if GATED:
        local += (row * H + h) * T + start
        if local_lo is not None:
            local_lo += (row * H + h) * T + start
        until += (row * H + h) * T + start
        base += (row * H + h) * T + start
        origin = tl.load(base + first)
        sums, sums_lo = sums_since(local, local_lo, base, origin, rows, length, GATE, BM)
        gate = (sums, origin, local, base)
        if local_lo is not None:
            gate = (sums, origin, local, base, sums_lo, local_lo)
        faded = divisor(tl.exp2(sums))
    for n in range(0, BM, DIAGONAL_STEP):  # mostly one iteration, which is no loop
        for step in tl.static_range(DIAGONAL_STEP // BN):
            acc, total = add_keys(acc, total, queries, k, k_token, v, v_token, first + n + step * BN, rows, length,
                                   c0, c1, c2,
                                   K, KP, V, VP, BN, True, LOW, EVEN, WIDE, PRECISION, dtype, gate, until,
                                   GATE)  # fmt: skip
    if GATED:
        acc *= (1.0 / faded)[:, None]
        total *= (1.0 / faded)[:, None]
    for n in range(chunk * chunk_length, first, BN):
        acc, total = add_keys(acc, total, queries, k, k_token, v, v_token, n, rows, length, c0, c1, c2,
                               K, KP, V, VP, BN, False, LOW, EVEN, WIDE, PRECISION, dtype, gate, until,
                               GATE)  # fmt: skip
    total = tl.sum(total if V == VP else tl.where(tl.arange(0, VP)[None, :] == V, acc, 0.0), 1)
    if not LOW:
        acc *= c2
        total *= c2
    if HAS_STATES and (HAS_INITIAL or chunk > 0):
        state = find_state(sequence, chunk, first_chunk, chunks_per_sequence, H, h, TILES * TILE, PACKED)
        if GATED:
            power, rest = split_power(tl.exp2(origin.to(tl.float32)))
            acc *= 1.0 / rest
            total *= 1.0 / rest
            acc, total = _add_state(acc, total, q, q_token, rows, length, kv + state * VP, z + state,
                                    K, VP, SLICES, PAIRS, TILES, BM, EVEN, PRECISION, dtype, power)  # fmt: skip
            acc *= rest
            total *= rest
        else:
            acc, total = _add_state(acc, total, q, q_token, rows, length, kv + state * VP, z + state,
                                    K, VP, SLICES, PAIRS, TILES, BM, EVEN, PRECISION, dtype)  # fmt: skip
    if GATED:
        acc *= faded[:, None]
        total *= faded
    scale = 1.0 / (total + eps)
    columns = tl.arange(0, VP)
    at = (row * T + start) * H + h
    tl.store(inverse + (row * H + h) * T + start + rows, scale, mask=rows < length)
    mask = (rows < length)[:, None] & (columns < V)[None, :]
    acc *= scale[:, None]
    outputs = acc.to(o.dtype.element_ty)
    tl.store(o + at * V + (rows[:, None] * (H * V) + columns[None, :]), outputs, mask=mask)
    if o_lo is not None and first < EARLY:
        o_lo, stride = find_o_lo(o_lo, at, sequence, H, h, V, LO_LIKE_O)
        lo = (acc - outputs.to(tl.float32)).to(o.dtype.element_ty)
        tl.store(o_lo + (rows[:, None] * stride + columns[None, :]), lo, mask=mask & (rows < EARLY)[:, None])
