"""Gradients, in two kernels: for a tile of queries against its keys, and for a tile of keys against its queries.

With delta_i = -(do_i . o_i), the gradient at sim_ij is (do_i . v_j + delta_i) / den_i.
"""

import triton
import triton.language as tl

from rebased.ops.polynomial.gpu.features import (
    BLOCK,
    EXTRA,
    TILE,
    against_z,
    fold,
    fold_linear,
    load_linear,
    load_rows,
    load_tile,
    locate,
    outer,
    pair_of,
    positions,
    similarity,
    slope,
)


@triton.jit
def _load_state(state, block, MIRROR: tl.constexpr, VP: tl.constexpr):
    """S [64, VP] and z's columns [64, 16] of one feature block; MIRROR: with its two tiles exchanged."""
    f = tl.arange(0, BLOCK)
    if MIRROR:
        f = f % TILE * TILE + f // TILE
    at = state + ((f + block * BLOCK) * (VP + EXTRA))[:, None]
    return tl.load(at + tl.arange(0, VP)[None, :]), tl.load(at + VP + tl.arange(0, EXTRA)[None, :])


@triton.jit
def _feature_grad(y, weight, kv, z, PRECISION: tl.constexpr):
    """[rows, 64]: the gradient y S^T + weight z^T at a block of features."""
    grad = tl.dot(y, tl.trans(kv), input_precision=PRECISION)
    return tl.dot(weight, tl.trans(z), grad, input_precision=PRECISION)


@triton.jit
def _pair_from_state(dx, dv, y, weight, scale, xa, xb, a, b, state, block, BOTH: tl.constexpr, VALUES: tl.constexpr,
                     VP: tl.constexpr, ROWS: tl.constexpr, SLOTS: tl.constexpr, PRECISION: tl.constexpr,
                     dtype: tl.constexpr):  # fmt: skip
    """What a pair block (a, b) sends to tile b and, if BOTH, mirrored to tile a; else a = b, and it counts twice."""
    kv, z = _load_state(state, block, False, VP)
    grad = _feature_grad(y, weight, kv, z, PRECISION)
    if VALUES:
        dv = tl.dot(outer(xa, xb, ROWS, dtype), kv, dv, input_precision=PRECISION)
    if BOTH:
        dx = fold(dx, grad, xa * scale[:, None], b, ROWS, SLOTS)
        kv, z = _load_state(state, block, True, VP)
        grad = _feature_grad(y, weight, kv, z, PRECISION)
        dx = fold(dx, grad, xb * scale[:, None], a, ROWS, SLOTS)
    else:
        dx = fold(dx, grad, xa * (2.0 * scale)[:, None], b, ROWS, SLOTS)
    return dx, dv


@triton.jit
def _from_state(dv, y, weight, scale, x, stride, rows, length, state, VALUES: tl.constexpr,
                K: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr, TILES: tl.constexpr, PAIRS: tl.constexpr,
                BLOCKS: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr, dtype: tl.constexpr):  # fmt: skip
    """The gradient [rows, KP] at x (queries or keys) of sum_i scale_i phi(x_i) . (S y_i + z weight_i), S being
    symmetric in the two factors; and, if VALUES, dv plus phi(x) S, the gradient at y. `weight` is made by against_z."""
    SLOTS: tl.constexpr = KP // TILE
    dx = tl.zeros([ROWS, SLOTS, TILE], tl.float32)
    if TILES <= 2:
        x0 = load_tile(x, stride, rows, length, 0, K)
        dx, dv = _pair_from_state(dx, dv, y, weight, scale, x0, x0, 0, 0, state, 0, False, VALUES,
                                  VP, ROWS, SLOTS, PRECISION, dtype)  # fmt: skip
        if TILES == 2:
            x1 = load_tile(x, stride, rows, length, 1, K)
            dx, dv = _pair_from_state(dx, dv, y, weight, scale, x0, x1, 0, 1, state, 1, True, VALUES,
                                      VP, ROWS, SLOTS, PRECISION, dtype)  # fmt: skip
            dx, dv = _pair_from_state(dx, dv, y, weight, scale, x1, x1, 1, 1, state, 2, False, VALUES,
                                      VP, ROWS, SLOTS, PRECISION, dtype)  # fmt: skip
    else:
        for block in range(PAIRS):
            a, b = pair_of(block, TILES)
            xa = load_tile(x, stride, rows, length, a, K)
            xb = load_tile(x, stride, rows, length, b, K)
            dx, dv = _pair_from_state(dx, dv, y, weight, scale, xa, xb, a, b, state, block, True, VALUES,
                                      VP, ROWS, SLOTS, PRECISION, dtype)  # fmt: skip
    for step in tl.static_range(BLOCKS - PAIRS):
        kv, z = _load_state(state, step + PAIRS, False, VP)
        grad = _feature_grad(y, weight, kv, z, PRECISION)
        dx = fold_linear(dx, grad * scale[:, None], step, ROWS, K, SLOTS)
        if VALUES:
            phi = load_linear(x, stride, rows, length, step, K).to(dtype)
            dv = tl.dot(phi, kv, dv, input_precision=PRECISION)
    return tl.reshape(dx, [ROWS, KP]), dv


@triton.jit
def _query_grad(dq, queries, grads, delta, scale, k, k_token, v, v_token, n, rows, length, c1, c2,
                K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr, VP: tl.constexpr, BN: tl.constexpr,
                DIAGONAL: tl.constexpr, LOW: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
                dtype: tl.constexpr):  # fmt: skip
    """dq plus what the keys n .. n+BN send."""
    columns = positions(n, BN, WIDE)
    keys = load_rows(k, k_token, columns, length, K, KP, DIAGONAL)
    values = load_rows(v, v_token, columns, length, V, VP, DIAGONAL)
    s = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
    ds = tl.dot(grads, tl.trans(values.to(dtype)), input_precision=PRECISION) + delta[:, None]
    ds *= slope(s, c1 * scale[:, None], c2 * scale[:, None], LOW)
    if DIAGONAL:
        ds = tl.where(rows[:, None] >= columns[None, :], ds, 0.0)
    return tl.dot(ds.to(dtype), keys.to(dtype), dq, input_precision=PRECISION)


@triton.jit(do_not_specialize=["blocks_per_sequence", "chunks_per_sequence", "chunk_length"])
def query_grad_kernel(
    q, k, v, o, do, inverse, dq, deltas, states,
    cu_seqlens, first_block, owner, first_chunk,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head, do_batch, do_token, do_head,
    T, H, blocks_per_sequence, chunks_per_sequence, chunk_length,
    c0, c1, c2,
    K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr, VP: tl.constexpr,
    TILES: tl.constexpr, PAIRS: tl.constexpr, BLOCKS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    LOW: tl.constexpr, HAS_STATES: tl.constexpr, HAS_INITIAL: tl.constexpr, PACKED: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dq [B,T,H,K], and deltas [B,H,T] = -(do . o) for the kernels that follow."""
    pid = tl.program_id(0)
    h = pid % H
    block = pid // H
    sequence, row, inside, start, length = locate(block, cu_seqlens, first_block, owner, T, blocks_per_sequence, PACKED)
    first = inside * BM
    if first >= length:
        return
    head = h.to(tl.int64)
    q += row * q_batch + start * q_token + head * q_head
    k += row * k_batch + start * k_token + head * k_head
    v += row * v_batch + start * v_token + head * v_head
    do += row * do_batch + start * do_token + head * do_head
    HALF: tl.constexpr = v.dtype.element_ty == tl.bfloat16
    dtype: tl.constexpr = tl.bfloat16 if HALF else tl.float32

    rows = positions(first, BM, WIDE)
    here = (row * T + start) * H + h
    scalars = (row * H + h) * T + start
    scale = tl.load(inverse + scalars + rows, mask=rows < length, other=0.0)
    grads = load_rows(do, do_token, rows, length, V, VP, True)
    outputs = load_rows(o + here * V, H * V, rows, length, V, VP, True)
    delta = -tl.sum(grads.to(tl.float32) * outputs.to(tl.float32), 1)
    tl.store(deltas + scalars + rows, delta, mask=rows < length)
    grads = grads.to(dtype)
    queries = load_rows(q, q_token, rows, length, K, KP, True)
    acc = tl.zeros([BM, KP], tl.float32)
    chunk = first // chunk_length
    for n in range(chunk * chunk_length, first, BN):
        acc = _query_grad(acc, queries, grads, delta, scale, k, k_token, v, v_token, n, rows, length, c1, c2,
                          K, KP, V, VP, BN, False, LOW, WIDE, PRECISION, dtype)  # fmt: skip
    for n in range(first, tl.minimum(first + BM, length), BN):
        acc = _query_grad(acc, queries, grads, delta, scale, k, k_token, v, v_token, n, rows, length, c1, c2,
                          K, KP, V, VP, BN, True, LOW, WIDE, PRECISION, dtype)  # fmt: skip
    if HAS_STATES and (HAS_INITIAL or chunk > 0):
        if PACKED:
            chunk += tl.load(first_chunk + sequence)
        else:
            chunk += sequence * chunks_per_sequence
        state = states + (chunk.to(tl.int64) * H + h) * (BLOCKS * BLOCK * (VP + EXTRA))
        more, _ = _from_state(acc, grads, against_z(delta, dtype), scale, q, q_token, rows, length, state, False,
                              K, KP, VP, TILES, PAIRS, BLOCKS, BM, PRECISION, dtype)  # fmt: skip
        acc += more
    columns = tl.arange(0, KP)
    tl.store(
        dq + here * K + (rows[:, None] * (H * K) + columns[None, :]),
        acc.to(dq.dtype.element_ty),
        mask=(rows < length)[:, None] & (columns < K)[None, :],
    )


@triton.jit
def _key_grad(dk, dv, keys, values, q, q_token, do, do_token, inverse, deltas, m, columns, length, c0, c1, c2,
              K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr, VP: tl.constexpr, BM: tl.constexpr,
              DIAGONAL: tl.constexpr, LOW: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
              dtype: tl.constexpr):  # fmt: skip
    """dk and dv plus what the queries m .. m+BM send. Scores are transposed here: [keys, queries]."""
    rows = positions(m, BM, WIDE)
    scale = tl.load(inverse + rows, mask=rows < length, other=0.0)
    delta = tl.load(deltas + rows, mask=rows < length, other=0.0)
    queries = load_rows(q, q_token, rows, length, K, KP, True)
    grads = load_rows(do, do_token, rows, length, V, VP, True).to(dtype)
    s = tl.dot(keys, tl.trans(queries), input_precision=PRECISION)
    c0, c1, c2 = c0 * scale[None, :], c1 * scale[None, :], c2 * scale[None, :]
    sim = similarity(s, c0, c1, c2, LOW)
    ds = tl.dot(values, tl.trans(grads), input_precision=PRECISION) + delta[None, :]
    ds *= slope(s, c1, c2, LOW)
    if DIAGONAL:
        seen = rows[None, :] >= columns[:, None]
        sim = tl.where(seen, sim, 0.0)
        ds = tl.where(seen, ds, 0.0)
    dv = tl.dot(sim.to(dtype), grads, dv, input_precision=PRECISION)
    dk = tl.dot(ds.to(dtype), queries.to(dtype), dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=["blocks_per_sequence", "chunks_per_sequence", "chunk_length"])
def key_grad_kernel(
    q, k, v, do, inverse, deltas, dk, dv, states,
    cu_seqlens, first_block, owner, first_chunk,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head, do_batch, do_token, do_head,
    T, H, blocks_per_sequence, chunks_per_sequence, chunk_length,
    c0, c1, c2,
    K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr, VP: tl.constexpr,
    TILES: tl.constexpr, PAIRS: tl.constexpr, BLOCKS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    LOW: tl.constexpr, HAS_STATES: tl.constexpr, PACKED: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk [B,T,H,K] and dv [B,T,H,V] for BN keys of one head; `states` holds the gradients of the states after."""
    pid = tl.program_id(0)
    h = pid % H
    block = pid // H
    sequence, row, inside, start, length = locate(block, cu_seqlens, first_block, owner, T, blocks_per_sequence, PACKED)
    first = inside * BN
    if first >= length:
        return
    head = h.to(tl.int64)
    q += row * q_batch + start * q_token + head * q_head
    k += row * k_batch + start * k_token + head * k_head
    v += row * v_batch + start * v_token + head * v_head
    do += row * do_batch + start * do_token + head * do_head
    here = (row * T + start) * H + h
    inverse += (row * H + h) * T + start
    deltas += (row * H + h) * T + start
    HALF: tl.constexpr = v.dtype.element_ty == tl.bfloat16
    dtype: tl.constexpr = tl.bfloat16 if HALF else tl.float32

    columns = positions(first, BN, WIDE)
    keys = load_rows(k, k_token, columns, length, K, KP, True)
    values = load_rows(v, v_token, columns, length, V, VP, True).to(dtype)
    acc_k = tl.zeros([BN, KP], tl.float32)
    acc_v = tl.zeros([BN, VP], tl.float32)
    chunk = first // chunk_length
    end = tl.minimum((chunk + 1) * chunk_length, length)
    for m in range(first, tl.minimum(first + BN, end), BM):
        acc_k, acc_v = _key_grad(acc_k, acc_v, keys, values, q, q_token, do, do_token, inverse, deltas, m, columns,
                                 length, c0, c1, c2, K, KP, V, VP, BM, True, LOW, WIDE, PRECISION, dtype)  # fmt: skip
    for m in range(first + BN, end, BM):
        acc_k, acc_v = _key_grad(acc_k, acc_v, keys, values, q, q_token, do, do_token, inverse, deltas, m, columns,
                                 length, c0, c1, c2, K, KP, V, VP, BM, False, LOW, WIDE, PRECISION, dtype)  # fmt: skip
    if HAS_STATES:
        if PACKED:
            chunk += tl.load(first_chunk + sequence)
        else:
            chunk += sequence * chunks_per_sequence
        state = states + (chunk.to(tl.int64) * H + h) * (BLOCKS * BLOCK * (VP + EXTRA))
        ones = tl.full([BN], 1.0, tl.float32)
        more, acc_v = _from_state(acc_v, values, against_z(ones, dtype), ones, k, k_token, columns, length, state, True,
                                  K, KP, VP, TILES, PAIRS, BLOCKS, BN, PRECISION, dtype)  # fmt: skip
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
