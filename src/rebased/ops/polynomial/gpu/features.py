"""What the kernels share: where the tokens of a program are, and second-degree features in tiles of 64.

Keys and queries are divided into slices of 8 columns. A *feature tile* is a pair of slices (a, b), a <= b, and holds
the 64 products x_i x_j, i in slice a, j in slice b. On chip it is an outer product. The compiler carries its layout
back from the tensor core product that reads it: half-precision multiplications in registers, no traffic through shared
memory. Where c0 or c1 is not zero, further tiles hold x_0 .. x_{K-1}, 1, in steps of 64. Tiles are numbered: pairs row
by row, then the linear ones. All features are bare monomials, for queries too: their weights are multiplied in when
sums over chunks become running totals (states.py).
"""

import triton
import triton.language as tl

SLICE = tl.constexpr(8)  # columns
TILE = tl.constexpr(64)  # features


@triton.jit
def locate(index, cu_seqlens, first, owner, T, per_sequence, PACKED: tl.constexpr):
    """Where tile or chunk number `index` is: (sequence, batch row, number within the sequence, first token of the
    sequence in the row, length of the sequence). `first` and `owner` are those of call.Documents."""
    if PACKED:
        sequence = tl.load(owner + index)
        inside = index - tl.load(first + sequence)
        start = tl.load(cu_seqlens + sequence)
        length = tl.load(cu_seqlens + sequence + 1) - start
        row = sequence * 0
    else:
        sequence = index // per_sequence
        inside = index % per_sequence
        start = sequence * 0
        length = T
        row = sequence
    return sequence, row.to(tl.int64), inside, start.to(tl.int64), length


@triton.jit
def locate_tile(cu_seqlens, first_tile, owner, T, H, tiles_per_sequence, SIZE: tl.constexpr, PACKED: tl.constexpr):
    """The head and the tile of SIZE tokens of this program: (head, sequence, batch row, first token of the sequence in
    the row, length of the sequence, first token of the tile in the sequence)."""
    pid = tl.program_id(0)
    h = pid % H
    tile = pid // H
    sequence, row, inside, start, length = locate(tile, cu_seqlens, first_tile, owner, T, tiles_per_sequence, PACKED)
    return h, sequence, row, start, length, inside * SIZE


@triton.jit
def find_head(x, row, start, head, batch, token, stride, UNIT: tl.constexpr):
    """The pointer to the first token of a sequence and head. All three strides are multiples of UNIT; a width such as
    24 would be read number by number if the compiler did not know."""
    return x + tl.multiple_of(row * batch + start * token + head.to(tl.int64) * stride, UNIT)


@triton.jit
def positions(first, SIZE: tl.constexpr, WIDE: tl.constexpr):
    """[SIZE]: first, first + 1, ...; in 64 bits if WIDE, where a position times a stride may not fit into 32."""
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
def load_numbers(base, rows, n_rows, MASK: tl.constexpr):
    """[rows]: one number per row; zeros outside."""
    if MASK:
        return tl.load(base + rows, mask=rows < n_rows, other=0.0)
    else:
        return tl.load(base + rows)


@triton.jit
def load_slice(base, stride, rows, n_rows, index, K: tl.constexpr, MASK_ROWS: tl.constexpr):
    """[rows, 8]: the columns of slice number `index`; zeros outside."""
    columns = tl.arange(0, SLICE) + index * SLICE
    where = base + (rows[:, None] * stride + columns[None, :])
    if MASK_ROWS or K % 8 != 0:
        return tl.load(where, mask=(rows < n_rows)[:, None] & (columns < K)[None, :], other=0.0)
    else:
        return tl.load(where)


@triton.jit
def load_slice_across(base, stride, rows, n_rows, index, K: tl.constexpr, MASK_ROWS: tl.constexpr):
    """[8, rows]: the transpose of load_slice, loaded transposed: Triton 3.4 to 3.7 miscompile a transposed register
    operand."""
    columns = tl.arange(0, SLICE) + index * SLICE
    where = base + (rows[None, :] * stride + columns[:, None])
    if MASK_ROWS or K % 8 != 0:
        return tl.load(where, mask=(rows < n_rows)[None, :] & (columns < K)[:, None], other=0.0)
    else:
        return tl.load(where)


@triton.jit
def load_linear_across(base, stride, rows, n_rows, step, K: tl.constexpr):
    """[64, rows]: the transpose of load_linear."""
    f = tl.arange(0, TILE) + step * TILE
    inside = (rows < n_rows)[None, :]
    x = tl.load(base + (rows[None, :] * stride + f[:, None]), mask=inside & (f < K)[:, None], other=0.0)
    return x.to(tl.float32) + (inside & (f == K)[:, None]).to(tl.float32)


@triton.jit
def load_linear(base, stride, rows, n_rows, step, K: tl.constexpr):
    """[rows, 64] in fp32: features step * 64 ... of x_0 .. x_{K-1}, 1."""
    f = tl.arange(0, TILE) + step * TILE
    inside = (rows < n_rows)[:, None]
    x = tl.load(base + (rows[:, None] * stride + f[None, :]), mask=inside & (f < K)[None, :], other=0.0)
    return x.to(tl.float32) + (inside & (f == K)[None, :]).to(tl.float32)


@triton.jit
def pair_of(tile, SLICES: tl.constexpr):
    """The slices (a, b) of a feature tile."""
    if SLICES <= 2:  # (0, 0), (0, 1), (1, 1): no loop, so that a constant stays a constant
        a = tile // 2
        b = (tile + 1) // 2
    else:
        a = tile * 0
        b = tile
        while b >= SLICES:
            a += 1
            b -= SLICES - a
    return a, b


@triton.jit
def outer(xa, xb, ROWS: tl.constexpr, dtype: tl.constexpr):
    """A feature tile [rows, 64] in dtype from slices [rows, 8]: one rounding of the exact product."""
    return tl.reshape(xa.to(dtype)[:, :, None] * xb.to(dtype)[:, None, :], [ROWS, TILE])


@triton.jit
def outer_across(xa, xb, ROWS: tl.constexpr, dtype: tl.constexpr):
    """The same from slices [8, rows]: [64, rows]."""
    return tl.reshape(xa.to(dtype)[:, None, :] * xb.to(dtype)[None, :, :], [TILE, ROWS])


@triton.jit
def outer_lo(xa, xb, product, ROWS: tl.constexpr):
    """The rounding error of a feature tile [rows, 64] in bf16 (`product`), itself in bf16."""
    a, b = tl.broadcast(xa[:, :, None], xb[:, None, :])
    return tl.reshape(tl.fma(a, b, -tl.reshape(product, [ROWS, SLICE, SLICE])), [ROWS, TILE])


@triton.jit
def outer_lo_across(xa, xb, xb_lo, product, ROWS: tl.constexpr):
    """The same for [64, rows]; xb_lo is the rounding error of xb, or None."""
    a, b = tl.broadcast(xa[:, None, :], xb[None, :, :])
    lo = tl.fma(a, b, -tl.reshape(product, [SLICE, SLICE, ROWS]))
    if xb_lo is not None:
        a, b = tl.broadcast(xa[:, None, :], xb_lo[None, :, :])
        lo = tl.fma(a, b, lo)
    return tl.reshape(lo, [TILE, ROWS])


@triton.jit
def fold(dx, grad, x, AXIS: tl.constexpr, index, ROWS: tl.constexpr, SLOTS: tl.constexpr):
    """dx [rows, SLOTS, 8] plus, in slot `index`, x times a gradient [rows, 64] at products x_i x_j, summed over i
    (AXIS 1) or over j (AXIS 2)."""
    factor = x[:, :, None] if AXIS == 1 else x[:, None, :]
    sums = tl.sum(tl.reshape(grad, [ROWS, SLICE, SLICE]) * factor, AXIS)
    return dx + tl.where(tl.arange(0, SLOTS)[None, :, None] == index, sums[:, None, :], 0.0)


@triton.jit
def fold_linear(dx, grad, step, ROWS: tl.constexpr, K: tl.constexpr, SLOTS: tl.constexpr):
    """dx [rows, SLOTS, 8] plus a gradient [rows, 64] at linear features: feature f is column f % 8 of slot f // 8."""
    PER_STEP: tl.constexpr = TILE // SLICE
    f = tl.arange(0, TILE) + step * TILE
    grad = tl.reshape(tl.where((f < K)[None, :], grad, 0.0), [ROWS, PER_STEP, SLICE])
    if SLOTS <= PER_STEP:  # all of K is in the first step; later steps are zero
        return dx + tl.sum(tl.reshape(grad, [ROWS, PER_STEP // SLOTS, SLOTS, SLICE]), 1)
    else:
        copies = tl.broadcast_to(grad[:, None, :, :], [ROWS, SLOTS // PER_STEP, PER_STEP, SLICE])
        here = tl.arange(0, SLOTS // PER_STEP)[None, :, None, None] == step
        return dx + tl.reshape(tl.where(here, copies, 0.0), [ROWS, SLOTS, SLICE])


@triton.jit
def similarity(s, c0, c1, c2, LOW: tl.constexpr):
    """c0 + c1 s + c2 s^2. If not LOW, c0 = c1 = 0 and the caller multiplies by c2 at the end."""
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
    """x in fp32, rounded to the precision of dtype. For bf16 in integer arithmetic: the compiler then converts the
    result to bf16 in pairs, which is far faster than number by number."""
    if dtype == tl.bfloat16:
        return ((x.to(tl.int32, bitcast=True) + 0x8000) & -65536).to(tl.float32, bitcast=True)
    else:
        return x


@triton.jit
def score_positions(first, SIZE: tl.constexpr, WIDE: tl.constexpr, dtype: tl.constexpr):
    """positions in the order of the columns of a matrix of scores that as_factor makes a factor."""
    if dtype == tl.float32:
        column = tl.arange(0, SIZE)
        rows = first + (column & -8) + (column & 1) * 4 + (column & 7) // 2
        return rows.to(tl.int64) if WIDE else rows
    else:
        return positions(first, SIZE, WIDE)


@triton.jit
def in_score_order(x, dtype: tl.constexpr):
    """Rows [rows, width] of consecutive tokens in the order of score_positions."""
    if dtype == tl.float32:
        ROWS: tl.constexpr = x.shape[0]
        WIDTH: tl.constexpr = x.shape[1]
        x = tl.permute(tl.reshape(x, [ROWS // 8, 2, 4, WIDTH]), (0, 2, 1, 3))
        return tl.reshape(x, [ROWS, WIDTH])
    else:
        return x


@triton.jit
def as_factor(x, dtype: tl.constexpr):
    """x [rows, columns], a function of scores with columns in the order of score_positions, in the natural order.

    Of every eight columns the tensor cores give a thread 2t and 2t + 1, and want t and t + 4 from it for a factor in
    TF32. With the columns in this order no number has to change its thread."""
    if dtype == tl.float32:
        ROWS: tl.constexpr = x.shape[0]
        COLUMNS: tl.constexpr = x.shape[1]
        x = tl.permute(tl.reshape(x, [ROWS, COLUMNS // 8, 4, 2]), (0, 1, 3, 2))
        return tl.reshape(x, [ROWS, COLUMNS])
    else:
        return x


@triton.jit
def add_product(acc, x, y, HI_LO: tl.constexpr, PRECISION: tl.constexpr, dtype: tl.constexpr):
    """acc plus x y, multiplied in dtype. If HI_LO, x in fp32 is multiplied as two bf16 numbers, which hold 16 bits."""
    y = y.to(dtype)
    if HI_LO and dtype == tl.bfloat16:
        x_hi = (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
        acc = tl.dot((x - x_hi).to(dtype), y, acc)
        x = x_hi
    return tl.dot(x.to(dtype), y, acc, input_precision=PRECISION)
