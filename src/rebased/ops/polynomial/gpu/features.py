"""What the kernels share: where a block of tokens lies, and second-degree features in blocks of 64.

Keys and queries are cut into tiles of 8 columns. A *feature block* is a pair of tiles (a, b), a <= b, and holds the 64
products x_i x_j, i in tile a, j in tile b. On chip it is an outer product whose layout the compiler carries back from
the tensor core product that eats it: half-precision multiplications in registers, no traffic through shared memory.
Where c0 or c1 is not zero, further blocks hold x_0 .. x_{K-1}, 1, in steps of 64.
Blocks are numbered: pairs row by row, then the linear ones. All features are bare monomials, for queries too: the
weights that stand before them are put on when sums over chunks become running totals (states.py).
"""

import triton
import triton.language as tl

TILE = tl.constexpr(8)
BLOCK = tl.constexpr(64)  # features in a block


@triton.jit
def locate(block, cu_seqlens, first_block, owner, T, blocks_per_sequence, PACKED: tl.constexpr):
    """Block number -> (sequence, batch row it lies in, which of its blocks, its first token in the row, its length)."""
    if PACKED:
        sequence = tl.load(owner + block)
        inside = block - tl.load(first_block + sequence)
        start = tl.load(cu_seqlens + sequence)
        length = tl.load(cu_seqlens + sequence + 1) - start
        row = sequence * 0
    else:
        sequence = block // blocks_per_sequence
        inside = block % blocks_per_sequence
        start = sequence * 0
        length = T
        row = sequence
    return sequence, row.to(tl.int64), inside, start.to(tl.int64), length


@triton.jit
def positions(first, SIZE: tl.constexpr, WIDE: tl.constexpr):
    """first, first + 1, ...; WIDE where a position times a stride may not fit into 32 bits."""
    rows = first + tl.arange(0, SIZE)
    if WIDE:
        rows = rows.to(tl.int64)
    return rows


@triton.jit
def load_rows(base, stride, rows, n_rows, n_columns: tl.constexpr, WIDTH: tl.constexpr, MASK_ROWS: tl.constexpr):
    """[rows, WIDTH] of a strided matrix; zeros outside."""
    columns = tl.arange(0, WIDTH)
    where = base + (rows[:, None] * stride + columns[None, :])
    if MASK_ROWS:
        mask = (rows < n_rows)[:, None]
        if n_columns != WIDTH:
            mask = mask & (columns < n_columns)[None, :]
        return tl.load(where, mask=mask, other=0.0)
    elif n_columns != WIDTH:
        return tl.load(where, mask=(columns < n_columns)[None, :], other=0.0)
    else:
        return tl.load(where)


@triton.jit
def load_tile(base, stride, rows, n_rows, tile, K: tl.constexpr, MASK_ROWS: tl.constexpr):
    """[rows, 8]: the columns of one tile."""
    columns = tl.arange(0, TILE) + tile * TILE
    where = base + (rows[:, None] * stride + columns[None, :])
    if MASK_ROWS or K % 8 != 0:
        return tl.load(where, mask=(rows < n_rows)[:, None] & (columns < K)[None, :], other=0.0)
    else:
        return tl.load(where)


@triton.jit
def load_tile_across(base, stride, rows, n_rows, tile, K: tl.constexpr, MASK_ROWS: tl.constexpr):
    """[8, rows]: the transpose of load_tile, loaded so (Triton 3.4 to 3.7 miscompile a transposed register operand)."""
    columns = tl.arange(0, TILE) + tile * TILE
    where = base + (rows[None, :] * stride + columns[:, None])
    if MASK_ROWS or K % 8 != 0:
        return tl.load(where, mask=(rows < n_rows)[None, :] & (columns < K)[:, None], other=0.0)
    else:
        return tl.load(where)


@triton.jit
def load_linear_across(base, stride, rows, n_rows, step, K: tl.constexpr):
    """[64, rows]: the transpose of load_linear."""
    f = tl.arange(0, BLOCK) + step * BLOCK
    inside = (rows < n_rows)[None, :]
    x = tl.load(base + (rows[None, :] * stride + f[:, None]), mask=inside & (f < K)[:, None], other=0.0)
    return x.to(tl.float32) + (inside & (f == K)[:, None]).to(tl.float32)


@triton.jit
def load_linear(base, stride, rows, n_rows, step, K: tl.constexpr):
    """[rows, 64] in fp32: features step * 64 ... of x_0 .. x_{K-1}, 1."""
    f = tl.arange(0, BLOCK) + step * BLOCK
    inside = (rows < n_rows)[:, None]
    x = tl.load(base + (rows[:, None] * stride + f[None, :]), mask=inside & (f < K)[None, :], other=0.0)
    return x.to(tl.float32) + (inside & (f == K)[None, :]).to(tl.float32)


@triton.jit
def pair_of(block, TILES: tl.constexpr):
    """The tiles (a, b) of a pair block."""
    if TILES <= 2:  # (0, 0), (0, 1), (1, 1): no loop, so that a constant stays one
        a = block // 2
        b = (block + 1) // 2
    else:
        a = block * 0
        b = block
        while b >= TILES:
            a += 1
            b -= TILES - a
    return a, b


@triton.jit
def outer(xa, xb, ROWS: tl.constexpr, dtype: tl.constexpr):
    """A feature block [rows, 64]. One rounding of the exact product, as a product in fp32 rounded to dtype."""
    return tl.reshape(xa.to(dtype)[:, :, None] * xb.to(dtype)[:, None, :], [ROWS, BLOCK])


@triton.jit
def outer_across(xa, xb, ROWS: tl.constexpr, dtype: tl.constexpr):
    """The same from tiles [8, rows]: [64, rows]."""
    return tl.reshape(xa.to(dtype)[:, None, :] * xb.to(dtype)[None, :, :], [BLOCK, ROWS])


@triton.jit
def outer_rest(xa, xb, product, ROWS: tl.constexpr):
    """What a feature block [rows, 64] of bf16 lost when it was rounded, but for a last digit."""
    a, b = tl.broadcast(xa[:, :, None], xb[:, None, :])
    return tl.reshape(tl.fma(a, b, -tl.reshape(product, [ROWS, TILE, TILE])), [ROWS, BLOCK])


@triton.jit
def outer_rest_across(xa, xb, xb_rest, product, ROWS: tl.constexpr):
    """The same for [64, rows]; xb may have lost something before."""
    a, b = tl.broadcast(xa[:, None, :], xb[None, :, :])
    rest = tl.fma(a, b, -tl.reshape(product, [TILE, TILE, ROWS]))
    if xb_rest is not None:
        a, b = tl.broadcast(xa[:, None, :], xb_rest[None, :, :])
        rest = tl.fma(a, b, rest)
    return tl.reshape(rest, [BLOCK, ROWS])


@triton.jit
def fold(dx, grad, x, AXIS: tl.constexpr, tile, ROWS: tl.constexpr, SLOTS: tl.constexpr):
    """dx [rows, SLOTS, 8], at `tile`, plus x times a gradient [rows, 64] at products x_i x_j, summed over i (AXIS 1) or
    over j (AXIS 2)."""
    factor = x[:, :, None] if AXIS == 1 else x[:, None, :]
    sums = tl.sum(tl.reshape(grad, [ROWS, TILE, TILE]) * factor, AXIS)
    return dx + tl.where(tl.arange(0, SLOTS)[None, :, None] == tile, sums[:, None, :], 0.0)


@triton.jit
def fold_linear(dx, grad, step, ROWS: tl.constexpr, K: tl.constexpr, SLOTS: tl.constexpr):
    """dx [rows, SLOTS, 8] plus a gradient [rows, 64] at linear features: feature f is column f % 8 of tile f // 8."""
    PER_STEP: tl.constexpr = BLOCK // TILE
    f = tl.arange(0, BLOCK) + step * BLOCK
    grad = tl.reshape(tl.where((f < K)[None, :], grad, 0.0), [ROWS, PER_STEP, TILE])
    if SLOTS <= PER_STEP:  # all of K is in the first step: what follows it is zero
        return dx + tl.sum(tl.reshape(grad, [ROWS, PER_STEP // SLOTS, SLOTS, TILE]), 1)
    else:
        copies = tl.broadcast_to(grad[:, None, :, :], [ROWS, SLOTS // PER_STEP, PER_STEP, TILE])
        here = tl.arange(0, SLOTS // PER_STEP)[None, :, None, None] == step
        return dx + tl.reshape(tl.where(here, copies, 0.0), [ROWS, SLOTS, TILE])


@triton.jit
def similarity(s, c0, c1, c2, LOW: tl.constexpr):
    """c0 + c1 s + c2 s^2; if not LOW, c0 = c1 = 0 and c2 is put on by the caller, at the end."""
    if LOW:
        return c0 + s * (c1 + c2 * s)
    else:
        return s * s


@triton.jit
def half_slope(s, c1, c2, LOW: tl.constexpr):
    """Half the derivative of similarity at s."""
    if LOW:
        return 0.5 * c1 + c2 * s
    else:
        return s


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """x in fp32, rounded to what dtype can hold. For bf16 in integers: the compiler would convert number by number, far
    slower than in pairs, which is how it converts what comes from here."""
    if dtype == tl.bfloat16:
        return ((x.to(tl.int32, bitcast=True) + 0x8000) & -65536).to(tl.float32, bitcast=True)
    else:
        return x


@triton.jit
def add_product(acc, x, y, WHOLE: tl.constexpr, PRECISION: tl.constexpr, dtype: tl.constexpr):
    """acc plus x y, multiplied in dtype; if WHOLE, x in fp32 goes in as two numbers of bf16, which hold 16 digits."""
    y = y.to(dtype)
    if WHOLE and dtype == tl.bfloat16:
        most = (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
        acc = tl.dot((x - most).to(dtype), y, acc)
        x = most
    return tl.dot(x.to(dtype), y, acc, input_precision=PRECISION)
