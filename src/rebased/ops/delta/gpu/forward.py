# mypy: allow-untyped-defs
"""The forward kernels of the delta rule. The equations are those of chunked_recurrence.py, with chunks of 64 tokens.

1. prepare, all chunks at once: unit queries and keys, sums of log decays, and N = (I + A)^-1 beta
2. states, one program per head and tile of values, chunk after chunk: x = N (v - e^a psi(k) S) and the next S
3. outputs, all chunks at once: o = e^a psi(q) S + P x

Features of degree 2 are tiles of 64 products of two slices of 8 columns (polynomial/gpu/features.py): (0, 0), (0, 1),
(1, 1). The second stands for two, so its weight is 2 in psi. Features of degree 1 are the key: one tile.

What the kernels hand to each other lies head by head, [B H, tokens, width]. It is padded with zeros to whole chunks and
powers of two, so no other kernel masks it.
"""

import triton
import triton.language as tl

from rebased.ops.polynomial.gpu.features import SLICE, outer, outer_across

C = tl.constexpr(64)  # tokens of a chunk
SMALLEST_BETA = tl.constexpr(1e-33)
"""In place of zero: so small that it changes nothing, and gradients can be divided by it."""


@triton.jit
def dot(x, y, PRODUCTS: tl.constexpr, acc=None):
    """x y, plus acc. PRODUCTS: "bf16" if x and y are bf16; of fp32 numbers "tf32", or the exact "tf32x3"."""
    return tl.dot(x, y, acc, input_precision="tf32x3" if PRODUCTS == "tf32x3" else "tf32")


@triton.jit
def rounded(x, PRODUCTS: tl.constexpr):
    """x as a factor of products. To TF32 it is rounded here: tensor cores would cut it off, and such errors add up."""
    if PRODUCTS == "tf32":
        x = x.to(tl.float32)
        bits = (x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000
        return tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    else:
        return x.to(tl.bfloat16 if PRODUCTS == "bf16" else tl.float32)


@triton.jit
def rows_of(base, first, WIDTH: tl.constexpr):
    """[C, WIDTH] of rows of WIDTH numbers."""
    rows = first + tl.arange(0, C)
    return tl.load(base + rows[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :])


@triton.jit
def columns_of(base, first, WIDTH: tl.constexpr):
    """[WIDTH, C]: the transpose, loaded transposed: Triton 3.4 to 3.7 miscompile a transposed register operand."""
    rows = first + tl.arange(0, C)
    return tl.load(base + rows[None, :] * WIDTH + tl.arange(0, WIDTH)[:, None])


@triton.jit
def values_of(base, first, column, WIDTH: tl.constexpr, BV: tl.constexpr):
    """[C, BV] of rows of WIDTH numbers, from a column on."""
    rows = first + tl.arange(0, C)
    return tl.load(base + rows[:, None] * WIDTH + (column + tl.arange(0, BV))[None, :])


@triton.jit
def given_values(base, stride, first, T, column, V, BV: tl.constexpr):
    """[C, BV] of a caller's tensor [T, V] with this stride; zeros outside."""
    rows, columns = first + tl.arange(0, C), column + tl.arange(0, BV)
    mask = (rows < T)[:, None] & (columns < V)[None, :]
    return tl.load(base + rows.to(tl.int64)[:, None] * stride + columns[None, :], mask=mask, other=0.0)


@triton.jit
def features(x, first, TILE: tl.constexpr, KP: tl.constexpr, DEGREE: tl.constexpr, PRODUCTS: tl.constexpr):
    """[C, FT]: a tile of the features of C rows of x [T, KP], in its dtype."""
    if DEGREE == 1:
        return rows_of(x, first, KP)
    else:
        where = x + (first + tl.arange(0, C))[:, None] * KP + tl.arange(0, SLICE)[None, :]
        xa, xb = tl.load(where + TILE // 2 * SLICE), tl.load(where + (TILE + 1) // 2 * SLICE)
        return rounded(outer(xa, xb, C, x.dtype.element_ty), PRODUCTS)


@triton.jit
def features_across(x, first, TILE: tl.constexpr, KP: tl.constexpr, DEGREE: tl.constexpr, PRODUCTS: tl.constexpr):
    """[FT, C]: the transpose."""
    if DEGREE == 1:
        return columns_of(x, first, KP)
    else:
        where = x + (first + tl.arange(0, C))[None, :] * KP + tl.arange(0, SLICE)[:, None]
        xa, xb = tl.load(where + TILE // 2 * SLICE), tl.load(where + (TILE + 1) // 2 * SLICE)
        return rounded(outer_across(xa, xb, C, x.dtype.element_ty), PRODUCTS)


@triton.jit
def state_tile(base, tile, column, FT: tl.constexpr, VP: tl.constexpr, BV: tl.constexpr):
    """Pointers to [FT, BV] of a state [F, VP]."""
    f = tile * FT + tl.arange(0, FT)
    return base + f[:, None] * VP + (column + tl.arange(0, BV))[None, :]


@triton.jit
def state_tile_across(base, tile, column, FT: tl.constexpr, VP: tl.constexpr, BV: tl.constexpr):
    """Pointers to its transpose [BV, FT]."""
    f = tile * FT + tl.arange(0, FT)
    return base + f[None, :] * VP + (column + tl.arange(0, BV))[:, None]


@triton.jit
def power(s, DEGREE: tl.constexpr):
    """The similarity of a query and a key with product s."""
    return s if DEGREE == 1 else s * s


@triton.jit
def decays(late, early, inside, HAS_GATE: tl.constexpr):
    """e^(late - early) where a pair is `inside`, else 0. No exponent is positive."""
    if HAS_GATE:
        return tl.where(inside, tl.exp(tl.where(inside, late - early, 0.0)), 0.0)
    else:
        return inside.to(tl.float32)


@triton.jit
def _unit(x, eps):
    """1 / the length of each row."""
    return tl.rsqrt(tl.sum(x * x, 1, keep_dims=True) + eps)


@triton.jit
def _of_fp32(x, y, PRODUCTS: tl.constexpr):
    """x y of fp32 numbers, whatever other products are of."""
    if PRODUCTS == "tf32":
        x, y = rounded(x, PRODUCTS), rounded(y, PRODUCTS)
    return dot(x, y, PRODUCTS)


@triton.jit
def _inverse(A, PRODUCTS: tl.constexpr):
    """(I + A)^-1 of A [64, 64], strictly lower: its four diagonal blocks by elimination, then twice by halves."""
    b = tl.arange(0, 4)
    diagonal = b[:, None, None, None] == b[None, None, :, None]
    blocks = tl.sum(tl.where(diagonal, tl.reshape(A, [4, 16, 4, 16]), 0.0), 2)  # [4, 16, 16]
    i = tl.arange(0, 16)[None, :, None]
    j = tl.arange(0, 16)[None, None, :]
    M = tl.where(i == j, 1.0, 0.0) + blocks * 0.0
    for step in range(15):
        column = tl.sum(tl.where(j == step, blocks, 0.0), 2, keep_dims=True)  # zero up to the diagonal
        row = tl.sum(tl.where(i == step, M, 0.0), 1, keep_dims=True)
        M -= column * row
    M = tl.reshape(tl.where(diagonal, tl.expand_dims(M, 2), 0.0), [64, 64])
    r = tl.arange(0, 64)[:, None]
    c = tl.arange(0, 64)[None, :]
    beside = tl.where((r // 32 == c // 32) & (r // 16 != c // 16), A, 0.0)
    M -= _of_fp32(_of_fp32(M, beside, PRODUCTS), M, PRODUCTS)
    beside = tl.where(r // 32 != c // 32, A, 0.0)
    M -= _of_fp32(_of_fp32(M, beside, PRODUCTS), M, PRODUCTS)
    return M


@triton.jit(do_not_specialize=["T", "chunks", "programs", "H"])
def prepare_kernel(
    q, k, beta, decay, qk, gates, N, q_batch, q_token, q_head, k_batch, k_token, k_head, T, chunks, programs, H, K, eps,
    KP: tl.constexpr, DEGREE: tl.constexpr, NORMALISE: tl.constexpr, HAS_GATE: tl.constexpr, PRODUCTS: tl.constexpr,
):  # fmt: skip
    """qk [2, BH, TP, KP]: queries and keys. gates [4, BH, TP]: sums of decays, beta, 1 / length of q and of k. N
    [BH, TP, C]. beta and decay are [B, T, H], dense; `programs` = BH * chunks."""
    pid = tl.program_id(0)
    m, first = pid // chunks, pid % chunks * C
    b, h = (m // H).to(tl.int64), m % H
    rows, columns = first + tl.arange(0, C), tl.arange(0, KP)
    to = pid.to(tl.int64) * C
    step = programs.to(tl.int64) * C  # numbers per kind of gate
    lanes = tl.arange(0, C)
    mask = (rows < T)[:, None] & (columns < K)[None, :]
    at = rows.to(tl.int64)[:, None]
    x = tl.load(q + b * q_batch + h * q_head + at * q_token + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    y = tl.load(k + b * k_batch + h * k_head + at * k_token + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    if NORMALISE:
        of_x, of_y = _unit(x, eps), _unit(y, eps)
        x, y = x * of_x, y * of_y
        tl.store(gates + 2 * step + to + lanes[:, None], of_x)
        tl.store(gates + 3 * step + to + lanes[:, None], of_y)
    x, y = rounded(x, PRODUCTS), rounded(y, PRODUCTS)
    inner = lanes[:, None] * KP + columns[None, :]
    tl.store(qk + to * KP + inner, x)
    keys = qk + (step + to) * KP
    tl.store(keys + inner, y)
    one = b * T * H + rows.to(tl.int64) * H + h
    strength = tl.load(beta + one, mask=rows < T, other=0.0).to(tl.float32)
    strength = tl.maximum(strength, SMALLEST_BETA)
    tl.store(gates + step + to + lanes, strength)
    a = tl.zeros([C], tl.float32)
    if HAS_GATE:
        a = tl.cumsum(tl.load(decay + one, mask=rows < T, other=0.0).to(tl.float32), 0)
        tl.store(gates + to + lanes, a)
    tl.debug_barrier()  # a thread reads what another wrote
    STEP: tl.constexpr = KP if KP < 64 else 64  # columns at a time: shared memory is short in fp32
    s = tl.zeros([C, C], tl.float32)
    for column in range(0, KP, STEP):
        some = column + tl.arange(0, STEP)
        down = tl.load(keys + lanes[:, None] * KP + some[None, :])
        across = tl.load(keys + lanes[None, :] * KP + some[:, None])
        s = dot(down, across, PRODUCTS, s)
    earlier = lanes[:, None] > lanes[None, :]
    A = strength[:, None] * power(s, DEGREE) * decays(a[:, None], a[None, :], earlier, HAS_GATE)
    solved = _inverse(A, PRODUCTS) * strength[None, :]
    tl.store(N + to * C + lanes[:, None] * C + lanes[None, :], rounded(solved, PRODUCTS))


@triton.jit
def _step(S, phi, x, kept, PRODUCTS: tl.constexpr):
    """The state after a chunk: kept S + phi^T x."""
    return dot(phi, x, PRODUCTS, S * kept)


@triton.jit(do_not_specialize=["T", "chunks", "programs", "H"])
def states_kernel(
    v, qk, gates, N, initial, bounds, x, states, final, v_batch, v_token, v_head, T, chunks, programs, H, V,
    KP: tl.constexpr, VP: tl.constexpr, BV: tl.constexpr, FT: tl.constexpr,
    TILES: tl.constexpr, DEGREE: tl.constexpr, HAS_GATE: tl.constexpr, PRODUCTS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """x [BH, TP, VP], the state before each chunk times its weights (states [BH, chunks, F, VP]) and after the last.

    PACKED: sequence n is a document of the only row, chunks bounds[n] to bounds[n + 1], with states of its own."""
    pid = tl.program_id(0)
    m, column = (pid // (VP // BV)).to(tl.int64), pid % (VP // BV) * BV
    F: tl.constexpr = TILES * FT
    own, start, count = m, 0, chunks
    if PACKED:
        start = tl.load(bounds + m // H)
        count = tl.load(bounds + m // H + 1) - start
        m = m % H
        v += start.to(tl.int64) * C * v_token
    v += m // H * v_batch + m % H * v_head
    k = qk + (programs.to(tl.int64) + m * chunks + start) * C * KP
    gates += (m * chunks + start) * C
    N += (m * chunks + start) * C * C
    x += (m * chunks + start) * C * VP
    states += (m * chunks + start) * F * VP
    initial += own * F * VP
    final += own * F * VP
    S0 = tl.load(state_tile(initial, 0, column, FT, VP, BV))
    if TILES == 3:
        S1 = tl.load(state_tile(initial, 1, column, FT, VP, BV))
        S2 = tl.load(state_tile(initial, 2, column, FT, VP, BV))
    for chunk in range(count):
        first = chunk * C
        known = rounded(S0, PRODUCTS)
        tl.store(state_tile(states, 0, column, FT, VP, BV), known)
        y = dot(features(k, first, 0, KP, DEGREE, PRODUCTS), known, PRODUCTS)
        if TILES == 3:
            known = rounded(2 * S1, PRODUCTS)
            tl.store(state_tile(states, 1, column, FT, VP, BV), known)
            y = dot(features(k, first, 1, KP, DEGREE, PRODUCTS), known, PRODUCTS, y)
            known = rounded(S2, PRODUCTS)
            tl.store(state_tile(states, 2, column, FT, VP, BV), known)
            y = dot(features(k, first, 2, KP, DEGREE, PRODUCTS), known, PRODUCTS, y)
        kept = 1.0
        if HAS_GATE:
            a = tl.load(gates + first + tl.arange(0, C))
            total = tl.load(gates + first + C - 1)
            kept = tl.exp(total)
            y *= tl.exp(a)[:, None]
        r = given_values(v, v_token, first, T, column, V, BV).to(tl.float32) - y
        new = dot(rows_of(N, first, C), rounded(r, PRODUCTS), PRODUCTS)
        where = (first + tl.arange(0, C))[:, None] * VP + (column + tl.arange(0, BV))[None, :]
        tl.store(x + where, rounded(new, PRODUCTS))
        if HAS_GATE:
            new *= tl.exp(total - a)[:, None]
        new = rounded(new, PRODUCTS)
        S0 = _step(S0, features_across(k, first, 0, KP, DEGREE, PRODUCTS), new, kept, PRODUCTS)
        if TILES == 3:
            S1 = _step(S1, features_across(k, first, 1, KP, DEGREE, PRODUCTS), new, kept, PRODUCTS)
            S2 = _step(S2, features_across(k, first, 2, KP, DEGREE, PRODUCTS), new, kept, PRODUCTS)
        states += F * VP
    tl.store(state_tile(final, 0, column, FT, VP, BV), S0)
    if TILES == 3:
        tl.store(state_tile(final, 1, column, FT, VP, BV), S1)
        tl.store(state_tile(final, 2, column, FT, VP, BV), S2)


@triton.jit(do_not_specialize=["T", "chunks", "programs", "H"])
def outputs_kernel(
    qk, gates, x, states, o, T, chunks, programs, H, V,
    KP: tl.constexpr, VP: tl.constexpr, BV: tl.constexpr, FT: tl.constexpr,
    TILES: tl.constexpr, DEGREE: tl.constexpr, HAS_GATE: tl.constexpr, PRODUCTS: tl.constexpr,
):  # fmt: skip
    """o [B, T, H, V], dense."""
    pid = tl.program_id(0) // (VP // BV)
    column = tl.program_id(0) % (VP // BV) * BV
    m, first = (pid // chunks).to(tl.int64), pid % chunks * C
    here = pid.to(tl.int64) * C
    q, k = qk + here * KP, qk + (programs.to(tl.int64) * C + here) * KP
    states += pid.to(tl.int64) * (TILES * FT * VP)
    lanes = tl.arange(0, C)
    sums = tl.zeros([C, BV], tl.float32)
    for tile in tl.static_range(TILES):
        S = tl.load(state_tile(states, tile, column, FT, VP, BV))
        sums = dot(features(q, 0, tile, KP, DEGREE, PRODUCTS), S, PRODUCTS, sums)
    a = tl.zeros([C], tl.float32)
    if HAS_GATE:
        a = tl.load(gates + here + lanes)
        sums *= tl.exp(a)[:, None]
    s = dot(rows_of(q, 0, KP), columns_of(k, 0, KP), PRODUCTS)
    P = power(s, DEGREE) * decays(a[:, None], a[None, :], lanes[:, None] >= lanes[None, :], HAS_GATE)
    sums = dot(rounded(P, PRODUCTS), values_of(x + here * VP, 0, column, VP, BV), PRODUCTS, sums)
    columns = column + tl.arange(0, BV)
    at = (m // H * T + first + lanes)[:, None] * (H * V) + m % H * V + columns[None, :]
    mask = (first + lanes < T)[:, None] & (columns < V)[None, :]
    tl.store(o + at, sums.to(o.dtype.element_ty), mask=mask)
