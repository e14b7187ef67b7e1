# mypy: allow-untyped-defs
"""The backward kernels of the delta rule. d with a name is the gradient there; S1 is the state after a chunk.

1. local, all chunks at once: P^T do, what the outputs of a chunk say about its own x
2. grad_states, from the last chunk to the first: dx = P^T do + e^(a_C - a) phi(k) dS1, dv = N^T dx, and the next dS
3. gradients, all chunks at once: those of q, k, beta and the decays

The gradient of A / beta is -dv x^T below the diagonal. That of beta is y . z, with x = beta y and dv = beta z. Every
factor e^a stands beside a similarity of degree d in q or k. So the gradient of a is (q . dq + k . dk) / d over the uses
of a token as a reader, less k . dk / d over its uses as a writer, plus <S, dS> at the end of the chunk.
"""

import triton
import triton.language as tl

from rebased.ops.delta.gpu.forward import (
    C,
    columns_of,
    decays,
    dot,
    features,
    features_across,
    given_values,
    power,
    rounded,
    rows_of,
    state_tile,
    state_tile_across,
    values_of,
)
from rebased.ops.polynomial.gpu.features import SLICE, fold


@triton.jit(do_not_specialize=["T", "chunks", "programs", "H"])
def local_kernel(
    do, qk, gates, dx, do_batch, do_token, do_head, T, chunks, programs, H, V,
    KP: tl.constexpr, VP: tl.constexpr, BV: tl.constexpr, DEGREE: tl.constexpr,
    HAS_GATE: tl.constexpr, PRODUCTS: tl.constexpr,
):  # fmt: skip
    """dx [BH, TP, VP] = P^T do."""
    pid = tl.program_id(0) // (VP // BV)
    column = tl.program_id(0) % (VP // BV) * BV
    m, first = (pid // chunks).to(tl.int64), pid % chunks * C
    here = pid.to(tl.int64) * C
    q, k = qk + here * KP, qk + (programs.to(tl.int64) * C + here) * KP
    lanes = tl.arange(0, C)
    a = tl.zeros([C], tl.float32)
    if HAS_GATE:
        a = tl.load(gates + here + lanes)
    s = dot(rows_of(k, 0, KP), columns_of(q, 0, KP), PRODUCTS)  # keys are rows
    P = power(s, DEGREE) * decays(a[None, :], a[:, None], lanes[None, :] >= lanes[:, None], HAS_GATE)
    dos = given_values(do + m // H * do_batch + m % H * do_head, do_token, first, T, column, V, BV)
    found = dot(rounded(P, PRODUCTS), rounded(dos, PRODUCTS), PRODUCTS)
    where = (here + lanes)[:, None] * VP + (column + tl.arange(0, BV))[None, :]
    tl.store(dx + where, rounded(found, PRODUCTS))


@triton.jit(do_not_specialize=["T", "chunks", "programs", "H"])
def grad_states_kernel(
    do, qk, gates, N, dx, d_final, bounds, dv, d_states, d_initial, do_batch, do_token, do_head,
    T, chunks, programs, H, V, KP: tl.constexpr, VP: tl.constexpr, BV: tl.constexpr, FT: tl.constexpr,
    TILES: tl.constexpr, DEGREE: tl.constexpr, HAS_GATE: tl.constexpr, PRODUCTS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """dv [B, T, H, V], dense; the gradient of the state after each chunk (d_states [BH, chunks, F, VP]) and of the
    first. PACKED as in states_kernel."""
    pid = tl.program_id(0)
    m, column = (pid // (VP // BV)).to(tl.int64), pid % (VP // BV) * BV
    F: tl.constexpr = TILES * FT
    own, start, count = m, 0, chunks
    if PACKED:
        start = tl.load(bounds + m // H)
        count = tl.load(bounds + m // H + 1) - start
        m = m % H
        do += start.to(tl.int64) * C * do_token
        dv += start.to(tl.int64) * C * (H * V)
    do += m // H * do_batch + m % H * do_head
    q = qk + (m * chunks + start) * C * KP
    k = q + programs.to(tl.int64) * C * KP
    gates += (m * chunks + start) * C
    N += (m * chunks + start) * C * C
    dx += (m * chunks + start) * C * VP
    dv += m // H * T * (H * V) + m % H * V
    d_states += (m * chunks + start) * F * VP
    d_final += own * F * VP
    d_initial += own * F * VP
    lanes, columns = tl.arange(0, C), column + tl.arange(0, BV)
    S0 = tl.load(state_tile(d_final, 0, column, FT, VP, BV))
    if TILES == 3:
        S1 = tl.load(state_tile(d_final, 1, column, FT, VP, BV))
        S2 = tl.load(state_tile(d_final, 2, column, FT, VP, BV))
    for step in range(count):
        chunk = count - 1 - step
        first = chunk * C
        to = d_states + chunk.to(tl.int64) * F * VP
        known = rounded(S0, PRODUCTS)
        tl.store(state_tile(to, 0, column, FT, VP, BV), known)
        y = dot(features(k, first, 0, KP, DEGREE, PRODUCTS), known, PRODUCTS)
        if TILES == 3:
            known = rounded(S1, PRODUCTS)
            tl.store(state_tile(to, 1, column, FT, VP, BV), known)
            y = dot(features(k, first, 1, KP, DEGREE, PRODUCTS), known, PRODUCTS, y)
            known = rounded(S2, PRODUCTS)
            tl.store(state_tile(to, 2, column, FT, VP, BV), known)
            y = dot(features(k, first, 2, KP, DEGREE, PRODUCTS), known, PRODUCTS, y)
        kept = 1.0
        if HAS_GATE:
            a = tl.load(gates + first + lanes)
            total = tl.load(gates + first + C - 1)
            kept = tl.exp(total)
            y *= tl.exp(total - a)[:, None]
        y += values_of(dx, first, column, VP, BV).to(tl.float32)
        dr = dot(columns_of(N, first, C), rounded(y, PRODUCTS), PRODUCTS)
        mask = (first + lanes < T)[:, None] & (columns < V)[None, :]
        tl.store(
            dv + (first + lanes).to(tl.int64)[:, None] * (H * V) + columns[None, :],
            dr.to(dv.dtype.element_ty),
            mask=mask,
        )
        dos = given_values(do, do_token, first, T, column, V, BV).to(tl.float32)
        if HAS_GATE:
            since = tl.exp(a)[:, None]
            dr *= since
            dos *= since
        dr, dos = rounded(-dr, PRODUCTS), rounded(dos, PRODUCTS)
        S0 = dot(features_across(q, first, 0, KP, DEGREE, PRODUCTS), dos, PRODUCTS, S0 * kept)
        S0 = dot(features_across(k, first, 0, KP, DEGREE, PRODUCTS), dr, PRODUCTS, S0)
        if TILES == 3:
            S1 = dot(features_across(q, first, 1, KP, DEGREE, PRODUCTS), dos + dos, PRODUCTS, S1 * kept)
            S1 = dot(features_across(k, first, 1, KP, DEGREE, PRODUCTS), dr + dr, PRODUCTS, S1)
            S2 = dot(features_across(q, first, 2, KP, DEGREE, PRODUCTS), dos, PRODUCTS, S2 * kept)
            S2 = dot(features_across(k, first, 2, KP, DEGREE, PRODUCTS), dr, PRODUCTS, S2)
    tl.store(state_tile(d_initial, 0, column, FT, VP, BV), S0)
    if TILES == 3:
        tl.store(state_tile(d_initial, 1, column, FT, VP, BV), S1)
        tl.store(state_tile(d_initial, 2, column, FT, VP, BV), S2)


@triton.jit
def _fold(dx, grad, xa, xb, tile, SLOTS: tl.constexpr):
    """dx [C, SLOTS, 8] plus the gradient of x from that of a tile of its features, [C, 64]."""
    dx = fold(dx, grad, xa, 1, (tile + 1) // 2, C, SLOTS)
    return fold(dx, grad, xb, 2, tile // 2, C, SLOTS)


@triton.jit
def _slope(s, DEGREE: tl.constexpr):
    """The derivative of `power` at s."""
    return 1.0 if DEGREE == 1 else 2 * s


@triton.jit
def _store_gradient(to, dx, x, inverse_length, rows, T, stride, columns, K, NORMALISE: tl.constexpr):
    """Stores the gradient at x = y / |y|, or that at y."""
    if NORMALISE:
        dx = (dx - x * tl.sum(x * dx, 1, keep_dims=True)) * inverse_length[:, None]
    mask = (rows < T)[:, None] & (columns < K)[None, :]
    tl.store(to + rows.to(tl.int64)[:, None] * stride + columns[None, :], dx.to(to.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["T", "chunks", "programs", "H"])
def gradients_kernel(
    do, dv, qk, gates, x, states, d_states, dq, dk, d_beta, d_decay, do_batch, do_token, do_head,
    T, chunks, programs, H, K, V,
    KP: tl.constexpr, VP: tl.constexpr, BV: tl.constexpr,
    FT: tl.constexpr, TILES: tl.constexpr, DEGREE: tl.constexpr, NORMALISE: tl.constexpr, HAS_GATE: tl.constexpr,
    PRODUCTS: tl.constexpr,
):  # fmt: skip
    """dq, dk [B, T, H, K] and d_beta, d_decay [B, T, H], dense."""
    pid = tl.program_id(0)
    m, first = (pid // chunks).to(tl.int64), pid % chunks * C
    here = pid.to(tl.int64) * C
    step = programs.to(tl.int64) * C
    q, k = qk + here * KP, qk + (step + here) * KP
    x += here * VP
    states += pid.to(tl.int64) * (TILES * FT * VP)
    d_states += pid.to(tl.int64) * (TILES * FT * VP)
    do += m // H * do_batch + m % H * do_head
    dv += m // H * T * (H * V) + m % H * V
    lanes, columns = tl.arange(0, C), tl.arange(0, KP)
    rows = first + lanes
    strength = tl.load(gates + step + here + lanes)
    a = tl.zeros([C], tl.float32)
    total = 0.0
    if HAS_GATE:
        a = tl.load(gates + here + lanes)
        total = tl.load(gates + here + C - 1)
    since, until = tl.exp(a)[:, None], tl.exp(total - a)[:, None]

    # pairs of tokens of this chunk
    dP = tl.zeros([C, C], tl.float32)
    dA = tl.zeros([C, C], tl.float32)
    of_beta = tl.zeros([C], tl.float32)
    for column in range(0, VP, BV):
        dos = rounded(given_values(do, do_token, first, T, column, V, BV), PRODUCTS)
        drs = given_values(dv, H * V, first, T, column, V, BV)
        where = x + lanes[None, :] * VP + (column + tl.arange(0, BV))[:, None]
        xs = tl.load(where)  # [BV, C]
        dP = dot(dos, xs, PRODUCTS, dP)
        dA = dot(rounded(drs, PRODUCTS), xs, PRODUCTS, dA)
        news = values_of(x, 0, column, VP, BV).to(tl.float32)
        of_beta += tl.sum(news / strength[:, None] * (drs.to(tl.float32) / strength[:, None]), 1)
    qs, ks = rows_of(q, 0, KP), rows_of(k, 0, KP)
    keys = columns_of(k, 0, KP)
    s = dot(qs, keys, PRODUCTS)
    E = decays(a[:, None], a[None, :], lanes[:, None] >= lanes[None, :], HAS_GATE)
    G = rounded(dP * E * _slope(s, DEGREE), PRODUCTS)
    d_query = dot(G, ks, PRODUCTS)  # [C, KP]
    d_written = dot(columns_of(q, 0, KP), G, PRODUCTS)  # [KP, C]: keys as writers
    s = dot(ks, keys, PRODUCTS)
    E = tl.where(lanes[:, None] > lanes[None, :], E, 0.0)
    G = rounded(-dA * E * _slope(s, DEGREE), PRODUCTS)
    d_key = dot(G, ks, PRODUCTS)  # keys as readers
    d_written = dot(keys, G, PRODUCTS, d_written)
    d_written = tl.trans(d_written)
    da = tl.sum(ks.to(tl.float32) * (d_key - d_written), 1)
    d_key += d_written
    beta_at = (m // H * T + rows) * H + m % H
    tl.store(d_beta + beta_at, of_beta, mask=rows < T)

    # the state before, and the gradient of the state after
    SLOTS: tl.constexpr = KP // SLICE
    through = 0.0  # <S, dS> at the end of the chunk
    if DEGREE == 2:
        dq_slots = tl.zeros([C, SLOTS, SLICE], tl.float32)
        dk_slots = tl.zeros([C, SLOTS, SLICE], tl.float32)
    for tile in range(TILES):
        f_query = tl.zeros([C, FT], tl.float32)
        f_read = tl.zeros([C, FT], tl.float32)
        f_write = tl.zeros([C, FT], tl.float32)
        overlap = tl.zeros([FT], tl.float32)
        for column in range(0, VP, BV):
            S = tl.load(state_tile_across(states, tile, column, FT, VP, BV))
            dS = tl.load(state_tile_across(d_states, tile, column, FT, VP, BV))
            dos = given_values(do, do_token, first, T, column, V, BV)
            drs = given_values(dv, H * V, first, T, column, V, BV)
            news = values_of(x, 0, column, VP, BV)
            if HAS_GATE:
                overlap += tl.sum(S.to(tl.float32) * dS.to(tl.float32), 0)
                dos, drs = dos.to(tl.float32) * since, drs.to(tl.float32) * since
                news = news.to(tl.float32) * until
            f_query = dot(rounded(dos, PRODUCTS), S, PRODUCTS, f_query)
            f_read = dot(rounded(drs, PRODUCTS), S, PRODUCTS, f_read)
            f_write = dot(rounded(news, PRODUCTS), dS, PRODUCTS, f_write)
        both = f_write - f_read
        if DEGREE == 1:
            d_query += f_query
            d_key += both
            phi = rows_of(k, 0, KP).to(tl.float32)
        else:
            at = lanes[:, None] * KP + tl.arange(0, SLICE)[None, :]
            qa = tl.load(q + at + tile // 2 * SLICE).to(tl.float32)
            qb = tl.load(q + at + (tile + 1) // 2 * SLICE).to(tl.float32)
            ka = tl.load(k + at + tile // 2 * SLICE).to(tl.float32)
            kb = tl.load(k + at + (tile + 1) // 2 * SLICE).to(tl.float32)
            dq_slots = _fold(dq_slots, f_query, qa, qb, tile, SLOTS)
            dk_slots = _fold(dk_slots, both, ka, kb, tile, SLOTS)
            phi = tl.reshape(ka[:, :, None] * kb[:, None, :], [C, FT])
        if HAS_GATE:
            da -= DEGREE * tl.sum(phi * (f_read + f_write), 1)
            through += tl.sum(phi * f_write)
            through += tl.exp(total) * tl.sum(overlap) * tl.where(tile == 1, 0.5, 1.0)  # states have their weights
    if DEGREE == 2:
        d_query += tl.reshape(dq_slots, [C, KP])
        d_key += tl.reshape(dk_slots, [C, KP])
    k_wide, q_wide = rows_of(k, 0, KP).to(tl.float32), rows_of(q, 0, KP).to(tl.float32)
    if HAS_GATE:
        da = (da + tl.sum(q_wide * d_query, 1)) / DEGREE
        later = lanes[:, None] >= lanes[None, :]
        dg = tl.sum(tl.where(later, da[:, None], 0.0), 0) + through
        tl.store(d_decay + beta_at, dg, mask=rows < T)
    stride = H * K
    of_q, of_k = strength, strength
    if NORMALISE:
        of_q, of_k = tl.load(gates + 2 * step + here + lanes), tl.load(gates + 3 * step + here + lanes)
    offset = m // H * T * stride + m % H * K
    _store_gradient(dq + offset, d_query, q_wide, of_q, rows, T, stride, columns, K, NORMALISE)
    _store_gradient(dk + offset, d_key, k_wide, of_k, rows, T, stride, columns, K, NORMALISE)
