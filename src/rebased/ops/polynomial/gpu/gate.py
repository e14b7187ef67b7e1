"""The gate: decays from the log decays g [B, T, H] of the tokens, and the gradient of g.

Let G be the sum of g up to a token. A similarity of query i and key j is multiplied by e^(G_i - G_j). No kernel has G:
sums of g begin anew with every tile of GATE tokens, and the sums of whole tiles (`base`) are fp64. So decays are exact
at any length. Exponents are in base two, and none is positive, however strong the decays are. A tile of queries meets
- the keys of its own tile with a factor per score, e^(G_i - G_j);
- all earlier keys with a factor per key, from the key to the first query, and at the end a factor per query.
Its own tile comes first, divided by that last factor: the compiler overlaps no products that a loop begins with zero.
"""

import triton
import triton.language as tl

from rebased.ops.polynomial.gpu.features import load_numbers, locate

LOG2_E = tl.constexpr(1.4426950408889634)
LEAST = tl.constexpr(-150.0)  # two to this power is 0 in fp32; sums that hold larger numbers would lose digits


@triton.jit(do_not_specialize=["chunks_per_sequence", "chunk_length"])
def decays_kernel(
    g, local, local_lo, until, kept, base, ends,
    cu_seqlens, first_chunk, owner,
    g_batch, g_token, g_head,
    T, H, chunks_per_sequence, chunk_length,
    GATE: tl.constexpr, TILES: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Sums of g over the tokens of a chunk (of a sequence, if there are no chunks), all [B, H, T].

    local: the sum from the first token of the tile to a token, with both; local_lo: its rounding error (or None).
    until: the decay from a token to the end of its tile; kept: to the end of its chunk (or None). base, at the first
    token of a tile: the sum from the first token of the chunk to the tile. ends [chunks, H]: the sum over the chunk.
    base and ends are fp64; sums are in base two.
    """
    pid = tl.program_id(0)
    h = pid % H
    chunk = pid // H
    _, row, inside, start, length = locate(chunk, cu_seqlens, first_chunk, owner, T, chunks_per_sequence, PACKED)
    begin = inside * chunk_length
    end = tl.minimum(begin + chunk_length, length)
    if begin >= length:
        return
    g += row * g_batch + start * g_token + h.to(tl.int64) * g_head
    here = (row * H + h) * T + start
    tiles = tl.arange(0, TILES)
    total = tl.sum(tl.zeros([TILES], tl.float64), 0)
    for first in range(begin, end, TILES * GATE):
        starts = first + tiles * GATE
        tokens = starts[:, None] + tl.arange(0, GATE)[None, :]
        mask = tokens < end
        x = tl.load(g + tokens.to(tl.int64) * g_token, mask=mask, other=0.0).to(tl.float32) * LOG2_E
        x = tl.where(x < LEAST, LEAST, x)
        x = x.to(tl.float64)
        sums = tl.cumsum(x, 1)
        whole = tl.sum(x, 1)
        before = total + (tl.cumsum(whole, 0) - whole)
        total += tl.sum(whole, 0)
        rounded = sums.to(tl.float32)
        tl.store(local + here + tokens, rounded, mask=mask)
        if local_lo is not None:
            tl.store(local_lo + here + tokens, (sums - rounded).to(tl.float32), mask=mask)
        tl.store(until + here + tokens, decay_between(whole[:, None], sums), mask=mask)
        tl.store(base + here + starts, before, mask=starts < end)
        if kept is not None:  # the chunk is one step of this loop
            tl.store(kept + here + tokens, decay_between(total - before[:, None], sums), mask=mask)
    tl.store(ends + chunk.to(tl.int64) * H + h, total)


@triton.jit
def divisor(decays):
    """What a sum is divided by before that which fades by `decays` is added, and multiplied with at the end: these, but
    at least 2**-60. Less would overflow, and beside the tokens of a tile counts for nothing in fp32."""
    return tl.maximum(decays, 2.0**-60, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def split_power(x):
    """x = power * rest, in [0, 1]: a power of two, which every float dtype multiplies exactly, and rest in [1, 2)."""
    power = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return power, tl.where(power > 0.0, x / tl.where(power > 0.0, power, 1.0), 1.0)


@triton.jit
def decay_between(later, earlier):
    """The factor from one place to a later one, of fp64 sums; at most 1 whatever was rounded. NaN stays NaN."""
    return tl.exp2(tl.minimum((later - earlier).to(tl.float32), 0.0, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def sums_since(local, local_lo, base, origin, tokens, length, GATE: tl.constexpr, SIZE: tl.constexpr):
    """(hi, lo) [tokens]: the sums of g from the first of SIZE tokens, where `base` is `origin`, to tokens. Without
    local_lo nobody reads lo, and it is hi: what is lost then counts in fp32 alone. Triton 3.6 cannot return None."""
    sums = load_numbers(local, tokens, length, True)
    if SIZE > GATE:
        before = tl.load(base + tokens // GATE * GATE, mask=tokens < length, other=0.0)
        before = tl.where(tokens < length, before - origin, 0.0)
    if local_lo is None:
        if SIZE > GATE:
            sums += before.to(tl.float32)
        return sums, sums
    else:
        lo = load_numbers(local_lo, tokens, length, True)
        if SIZE > GATE:
            wide = before + sums.to(tl.float64)
            sums = wide.to(tl.float32)
            lo += (wide - sums).to(tl.float32)
        return sums, lo


@triton.jit
def own_decays(gate, tokens, length, GATE: tl.constexpr, SIZE: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Decays of scores on the diagonal of SIZE tokens, which `gate` is of: [queries, keys], where keys are `tokens`;
    TRANSPOSED: [keys, queries], where queries are. 1 where the key comes later."""
    hi, origin, local, base = gate[0], gate[1], gate[2], gate[3]
    EXACT: tl.constexpr = len(gate) == 6  # a tuple with None in it is more than Triton 3.6 can take
    other, other_lo = sums_since(local, gate[5] if EXACT else None, base, origin, tokens, length, GATE, SIZE)
    x = other[None, :] - hi[:, None] if TRANSPOSED else hi[:, None] - other[None, :]
    if EXACT:
        x += other_lo[None, :] - gate[4][:, None] if TRANSPOSED else gate[4][:, None] - other_lo[None, :]
    return tl.exp2(tl.minimum(x, 0.0))


@triton.jit
def key_decays(gate, until, n, columns, length, GATE: tl.constexpr, SIZE: tl.constexpr, DIAGONAL: tl.constexpr):
    """Factors of scores [queries, keys] of SIZE queries with the keys n ..: own_decays on the DIAGONAL; else of each
    key, from it to the first query: [1, keys]."""
    if DIAGONAL:
        return own_decays(gate, columns, length, GATE, SIZE, False)
    else:
        origin, base = gate[1], gate[3]
        rest = decay_between(origin, tl.load(base + (n // GATE + 1) * GATE))
        return (rest * tl.load(until + columns))[None, :]


@triton.jit(do_not_specialize=["chunks_per_sequence", "chunk_length"])
def decay_grad_kernel(
    rows, columns, past, shares, dg,
    cu_seqlens, first_chunk, owner,
    T, H, chunks_per_sequence, chunk_length, spans,
    BT: tl.constexpr, SPANS: tl.constexpr, HAS_STATES: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """dg [B, T, H]. With W the gradient at a decayed similarity times it, dg_t is the sum of W_ij over i >= t > j.

    rows, columns [B, H, T]: sums of W over all keys of a query, and over the queries of a key in its chunk. Their
    difference, summed from the end of the chunk, leaves the pairs with t between them: both are sums of the same
    numbers, and the others cancel. HAS_STATES: past [B, H, T] are the sums over the queries after the chunk, and
    shares [chunks, H, spans] add up to those of all pairs with the chunk between them.
    """
    pid = tl.program_id(0)
    h = pid % H
    chunk = pid // H
    _, row, inside, start, length = locate(chunk, cu_seqlens, first_chunk, owner, T, chunks_per_sequence, PACKED)
    begin = inside * chunk_length
    end = tl.minimum(begin + chunk_length, length)
    if begin >= length:
        return
    here = (row * H + h) * T + start
    dg += (row * T + start) * H + h
    carried = tl.sum(tl.zeros([BT], tl.float32), 0)
    if HAS_STATES:
        shares += (chunk.to(tl.int64) * H + h) * spans
        for first in range(0, spans, SPANS):
            at = first + tl.arange(0, SPANS)
            carried += tl.sum(tl.load(shares + at, mask=at < spans, other=0.0), 0)
    for step in range(tl.cdiv(end - begin, BT)):
        tokens = begin + (tl.cdiv(end - begin, BT) - 1 - step) * BT + tl.arange(0, BT)
        x = load_numbers(rows + here, tokens, end, True) - load_numbers(columns + here, tokens, end, True)
        sums = carried + tl.cumsum(x, 0, reverse=True)
        if HAS_STATES:  # the chunk is one step
            later = load_numbers(past + here, tokens, end, True)
            sums += tl.cumsum(later, 0) - later
        tl.store(dg + tokens.to(tl.int64) * H, sums.to(dg.dtype.element_ty), mask=tokens < end)
        carried += tl.sum(x, 0)
