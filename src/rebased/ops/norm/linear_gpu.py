# mypy: allow-untyped-defs
"""A narrow projection and the norm of its output in one kernel, so that the output is written once and never read.

The backward needs no projection: what it wants of one, per row, are sums that x and the D x D matrix W^T W give. Its
programs loop over rows, and keep their share of the sums over rows in registers. The shares are then added in a fixed
order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rebased.ops.comparison import ROUNDOFF, differentiate, pick, row_slices, some
from rebased.ops.kernel_launch import call_operator, launch
from rebased.ops.norm.gpu import locate, standardise
from rebased.ops.self_check import checked

MAX_FEATURES = 64
"""The largest D: the gradient of the projection, [D, N], stays in registers."""
MAX_WIDTH = 256
"""The largest N: a row of the projection stays in registers."""

ROWS, BACKWARD_ROWS = 32, 32  # of a tile
PART = tl.constexpr(64)  # columns of dy that the backward takes at a time
COLUMNS = tl.constexpr(16)  # of the projection's gradient that a program makes from the sums
PROGRAMS = 264  # at most: two for each multiprocessor


@triton.jit
def _load(x, tile, M, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr):
    """A tile [ROWS, BLOCK_D] of x [M, D], with zeros outside."""
    at, inside, _ = locate(tile, M, D, ROWS, BLOCK_D)
    return tl.load(x + at, mask=inside, other=0.0)


@triton.jit
def linear_norm_kernel(
    x, projection, weight, bias, y, scales, M, eps, tiles,
    D: tl.constexpr, N: tl.constexpr, BLOCK_D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """y [M, N], the norm of x projection^T, and scales [M] = 1 / deviation; x [M, D], projection [N, D], weight and
    bias [N]."""
    matrix = _load(projection, 0, N, D, BLOCK_D, WIDTH)
    columns = tl.arange(0, WIDTH)[None, :]
    gain = tl.full([1, WIDTH], 1.0, tl.float32)
    shift = tl.zeros([1, WIDTH], tl.float32)
    if HAS_WEIGHT:
        gain = tl.load(weight + columns, mask=columns < N, other=0.0).to(tl.float32)
    if HAS_BIAS:
        shift = tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        given = _load(x, tile, M, D, BLOCK_D, ROWS)
        projected = tl.dot(given, tl.trans(matrix), input_precision="tf32")
        at, inside, _ = locate(tile, M, N, ROWS, WIDTH)
        standard, scale = standardise(projected, inside, N, eps, True)
        tl.store(y + at, (standard * gain + shift).to(y.dtype.element_ty), mask=inside)
        row = tile * ROWS + tl.arange(0, ROWS)
        tl.store(scales + row, tl.reshape(scale, [ROWS]), mask=row < M)


@triton.jit
def _load_part(x, part, row, in_row, N: tl.constexpr):
    """Columns part * PART ... of rows [R] of a matrix with N columns: [R, PART], with zeros outside."""
    n = part * PART + tl.arange(0, PART)
    return tl.load(x + row[:, None] * N + n[None, :], mask=in_row[:, None] & (n < N)[None, :], other=0.0)


@triton.jit
def _load_centred(projection, mean, part, D: tl.constexpr, BLOCK_D: tl.constexpr, N: tl.constexpr):
    """Rows part * PART ... of the projection less their mean over all rows: [PART, BLOCK_D] in fp32."""
    n = part * PART + tl.arange(0, PART)
    d = tl.arange(0, BLOCK_D)
    inside = (n < N)[:, None] & (d < D)[None, :]
    w = tl.load(projection + n[:, None] * D + d[None, :], mask=inside, other=0.0).to(tl.float32)
    return tl.where(inside, w - mean[None, :], 0.0)


@triton.jit
def _back_through_part(
    u, share, shift, part, projection, weight, mean, dy, row, in_row, xs,
    D: tl.constexpr, N: tl.constexpr, BLOCK_D: tl.constexpr, HAS_WEIGHT: tl.constexpr,
):  # fmt: skip
    """For one part of the columns of dy: u [R, D] plus dy (gain W), share [PART, D] plus dy^T xs, shift [PART] plus its
    sums."""
    w = _load_centred(projection, mean, part, D, BLOCK_D, N)
    n = part * PART + tl.arange(0, PART)
    if HAS_WEIGHT:
        w *= tl.load(weight + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    out = _load_part(dy, part, row, in_row, N)
    u = tl.dot(out, w.to(out.dtype), u, input_precision="tf32")
    # Loaded again, transposed: Triton 3.4 to 3.7 miscompile a transposed operand in registers.
    across = tl.load(dy + row[None, :] * N + n[:, None], mask=in_row[None, :] & (n < N)[:, None], other=0.0)
    share = tl.dot(across, xs.to(across.dtype), share, input_precision="tf32")
    shift += tl.sum(across.to(tl.float32), 1)
    return u, share, shift


@triton.jit
def _store_part(to, share, shift, part, D: tl.constexpr, N: tl.constexpr, BLOCK_D: tl.constexpr):
    """Stores what one part of the columns of dy gave: share [PART, D] and shift [PART]."""
    n = part * PART + tl.arange(0, PART)
    d = tl.arange(0, BLOCK_D)
    tl.store(to + n[:, None] * D + d[None, :], share, mask=(n < N)[:, None] & (d < D)[None, :])
    tl.store(to + N * D + n, shift, mask=n < N)


@triton.jit
def linear_norm_backward_kernel(
    x, projection, weight, scales, dy, dx, shares, M, tiles,
    D: tl.constexpr, N: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, HAS_WEIGHT: tl.constexpr,
):  # fmt: skip
    """dx [M, D], and this program's share [N D + N + D D] of three sums over rows (see `_backward`).

    With W the centred projection, C = W^T W and s the scale of a row, the norm is y = gain s (x W^T) + bias. So
    u = dy (gain W), a = s (x . u) / N, and dx = s (u - a s x C): no tensor is as wide as N but dy, which is read once.
    """
    d = tl.arange(0, BLOCK_D)
    PARTS: tl.constexpr = (N + PART - 1) // PART
    zero = tl.zeros([BLOCK_D], tl.float32)
    mean = zero
    for part in tl.static_range(PARTS):
        mean += tl.sum(_load_centred(projection, zero, part, D, BLOCK_D, N), 0)
    mean /= N
    gram = tl.zeros([BLOCK_D, BLOCK_D], tl.float32)
    for part in tl.static_range(PARTS):
        w = _load_centred(projection, mean, part, D, BLOCK_D, N)
        n = part * PART + tl.arange(0, PART)
        filled = (n < N)[None, :] & (d < D)[:, None]
        w_across = tl.load(projection + n[None, :] * D + d[:, None], mask=filled, other=0.0).to(tl.float32)
        w_across = tl.where(filled, w_across - mean[:, None], 0.0)
        gram = tl.dot(w_across, w, gram, input_precision="tf32")
    share0 = tl.zeros([PART, BLOCK_D], tl.float32)
    share1 = share0
    share2 = share0
    share3 = share0
    shift0 = tl.zeros([PART], tl.float32)
    shift1 = shift0
    shift2 = shift0
    shift3 = shift0
    moments = tl.zeros([BLOCK_D, BLOCK_D], tl.float32)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        in_row = row < M
        at = row[:, None] * D + d[None, :]
        inside = in_row[:, None] & (d < D)[None, :]
        given = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(scales + row, mask=in_row, other=0.0)
        xs = given * scale[:, None]
        u = tl.zeros([ROWS, BLOCK_D], tl.float32)
        u, share0, shift0 = _back_through_part(
            u, share0, shift0, 0, projection, weight, mean, dy, row, in_row, xs, D, N, BLOCK_D, HAS_WEIGHT
        )
        if PARTS > 1:
            u, share1, shift1 = _back_through_part(
                u, share1, shift1, 1, projection, weight, mean, dy, row, in_row, xs, D, N, BLOCK_D, HAS_WEIGHT
            )
        if PARTS > 2:
            u, share2, shift2 = _back_through_part(
                u, share2, shift2, 2, projection, weight, mean, dy, row, in_row, xs, D, N, BLOCK_D, HAS_WEIGHT
            )
        if PARTS > 3:
            u, share3, shift3 = _back_through_part(
                u, share3, shift3, 3, projection, weight, mean, dy, row, in_row, xs, D, N, BLOCK_D, HAS_WEIGHT
            )
        a = scale * tl.sum(given * u, 1) / N
        back = scale[:, None] * tl.dot(xs * -a[:, None], gram, u, input_precision="tf32")
        tl.store(dx + at, back.to(dx.dtype.element_ty), mask=inside)
        across = tl.load(x + row[None, :] * D + d[:, None], mask=in_row[None, :] & (d < D)[:, None], other=0.0)
        weighted = across.to(tl.float32) * (a * scale * scale)[None, :]
        moments = tl.dot(weighted, given, moments, input_precision="tf32")
    shares += tl.program_id(0) * (N * D + N + D * D)
    _store_part(shares, share0, shift0, 0, D, N, BLOCK_D)
    if PARTS > 1:
        _store_part(shares, share1, shift1, 1, D, N, BLOCK_D)
    if PARTS > 2:
        _store_part(shares, share2, shift2, 2, D, N, BLOCK_D)
    if PARTS > 3:
        _store_part(shares, share3, shift3, 3, D, N, BLOCK_D)
    square = (d < D)[:, None] & (d < D)[None, :]
    tl.store(shares + N * D + N + d[:, None] * D + d[None, :], moments, mask=square)


@triton.jit
def _load_columns(sums, weight, part, c, D: tl.constexpr, N: tl.constexpr, HAS_WEIGHT: tl.constexpr):
    """Rows part * PART ... of gain G at columns c: [PART, COLUMNS], with zeros outside."""
    n = part * PART + tl.arange(0, PART)
    share = tl.load(sums + n[:, None] * D + c[None, :], mask=(n < N)[:, None] & (c < D)[None, :], other=0.0)
    if HAS_WEIGHT:
        share *= tl.load(weight + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    return share


@triton.jit
def linear_norm_sums_kernel(
    projection, weight, sums, dprojection, dweight, dbias,
    D: tl.constexpr, N: tl.constexpr, BLOCK_D: tl.constexpr, HAS_WEIGHT: tl.constexpr,
):  # fmt: skip
    """COLUMNS columns of dprojection [N, D], and in the first program dweight and dbias [N], from the sums over rows
    (see `_backward`). Rows are taken in parts, which fit the shared memory of every GPU."""
    PARTS: tl.constexpr = (N + PART - 1) // PART
    d = tl.arange(0, BLOCK_D)
    c = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    zero = tl.zeros([BLOCK_D], tl.float32)
    mean = zero
    total = tl.zeros([COLUMNS], tl.float32)
    for part in tl.static_range(PARTS):
        mean += tl.sum(_load_centred(projection, zero, part, D, BLOCK_D, N), 0)
        total += tl.sum(_load_columns(sums, weight, part, c, D, N, HAS_WEIGHT), 0)
    mean /= N
    total /= N  # the mean of dprojection: that of W A is zero, because W is centred
    square = (d < D)[:, None] & (c < D)[None, :]
    moments = tl.load(sums + N * D + N + d[:, None] * D + c[None, :], mask=square, other=0.0)
    for part in tl.static_range(PARTS):
        n = part * PART + tl.arange(0, PART)
        w = _load_centred(projection, mean, part, D, BLOCK_D, N)
        dw = _load_columns(sums, weight, part, c, D, N, HAS_WEIGHT) - total[None, :]
        dw -= tl.dot(w, moments, input_precision="tf32x3")
        tl.store(dprojection + n[:, None] * D + c[None, :], dw, mask=(n < N)[:, None] & (c < D)[None, :])
        if tl.program_id(0) == 0:
            inside = (n < N)[:, None] & (d < D)[None, :]
            shares = tl.load(sums + n[:, None] * D + d[None, :], mask=inside, other=0.0)
            tl.store(dweight + n, tl.sum(w * shares, 1), mask=n < N)
            tl.store(dbias + n, tl.load(sums + N * D + n, mask=n < N, other=0.0), mask=n < N)


def _sizes(x: Tensor, projection: Tensor) -> tuple[int, dict[str, int]]:
    """The number of rows M, and the widths as constants of a kernel."""
    N, D = projection.shape
    return x.numel() // D, {"D": D, "N": N, "BLOCK_D": max(16, triton.next_power_of_2(D))}


def _in_torch(x, projection, weight, bias, eps):
    """As _forward."""
    wide = torch.promote_types(x.dtype, torch.float32)
    projected = x.to(wide) @ projection.to(wide).T
    projected = projected - projected.mean(-1, keepdim=True)
    scales = (projected.square().mean(-1, keepdim=True) + eps).rsqrt()
    y = projected * scales * (1 if weight is None else weight.to(wide)) + (0 if bias is None else bias.to(wide))
    return y.to(x.dtype), scales.flatten()


def _some_rows(args, results):
    x, *others = args
    y, scales = results
    numbers = some(len(scales), 256, every=64)
    rows = (each.reshape(len(scales), -1) for each in (x, y))
    x, y = (pick(each, 0, numbers) for each in rows)
    return (x, *others), [y, pick(scales, 0, numbers)]


def _roundoff(x, *_):
    return ROUNDOFF[x.dtype]


@checked(_in_torch, sample=_some_rows, roundoff=_roundoff)
def _forward(
    x: Tensor, projection: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    M, widths = _sizes(x, projection)
    y, scales = x.new_empty(*x.shape[:-1], len(projection)), x.new_empty(M, dtype=torch.float32)
    tiles = triton.cdiv(M, ROWS)
    launch(
        linear_norm_kernel, (min(tiles, PROGRAMS),),
        x, projection, weight, bias, y, scales, M, eps, tiles,
        **widths, WIDTH=max(16, triton.next_power_of_2(len(projection))), ROWS=ROWS,
        HAS_WEIGHT=weight is not None, HAS_BIAS=bias is not None, num_warps=8, num_stages=2,
    )  # fmt: skip
    return y, scales


_operator = torch.library.custom_op("rebased::linear_norm", _forward, mutates_args=())


@_operator.register_fake
def _(x, projection, weight, bias, eps):
    rows = x.shape[:-1]
    return x.new_empty(*rows, projection.shape[0]), x.new_empty(rows.numel(), dtype=torch.float32)


def _backward_in_torch(dy, x, projection, weight, scales):
    """As _backward. The scales are as they were computed, and eps with them."""
    wide = torch.promote_types(x.dtype, torch.float32)
    ones = projection.new_ones(len(projection), dtype=wide)
    projected = (x.to(wide) @ projection.to(wide).T).flatten(0, -2)
    eps = (scales.double() ** -2 - projected.double().var(-1, correction=0)).to(wide).unsqueeze(-1)

    def forward(x, projection, weight, bias):
        y = x.to(wide) @ projection.to(wide).T
        y = y - y.mean(-1, keepdim=True)
        y = y * (y.square().mean(-1, keepdim=True) + eps.view(*y.shape[:-1], 1)).rsqrt()
        return (y * weight.to(wide) + bias).to(dy.dtype)

    inputs = (x, projection, ones if weight is None else weight, torch.zeros_like(ones))
    dx, *sums = differentiate(forward, inputs, dy)
    return dx, *(each.to(wide) for each in sums)


def _all_rows(args, results):
    dy, x, projection, weight, scales = args
    dy, x, dx = (each.reshape(len(scales), -1) for each in (dy, x, results[0]))
    for rows in row_slices(len(x), 4 * dy.shape[1]):
        yield (dy[rows], x[rows], projection, weight, scales[rows]), dx[rows]


@torch.library.custom_op("rebased::linear_norm_backward", mutates_args=())
@checked(_backward_in_torch, slices=_all_rows, roundoff=lambda dy, x, *_: _roundoff(x))
def _backward(
    dy: Tensor, x: Tensor, projection: Tensor, weight: Tensor | None, scales: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dx, dprojection, dweight, dbias, the last three in fp32.

    The kernel sums over rows: G = dy^T (s x) [N, D], the columns of dy [N], and A = sum of a s^2 x x^T [D, D]. Then
    dweight = W . G, row by row, and dprojection is gain G - W A, centred; W is the centred projection.
    """
    M, widths = _sizes(x, projection)
    N, D = projection.shape
    tiles = triton.cdiv(M, BACKWARD_ROWS)
    programs = min(tiles, PROGRAMS)
    dx = torch.empty_like(x)
    shares = x.new_empty(programs, N * D + N + D * D, dtype=torch.float32)
    launch(
        linear_norm_backward_kernel, (programs,),
        x, projection, weight, scales, dy, dx, shares, M, tiles,
        **widths, ROWS=BACKWARD_ROWS, HAS_WEIGHT=weight is not None, num_warps=4, num_stages=1,
    )  # fmt: skip
    dprojection = torch.empty_like(projection, dtype=torch.float32, memory_format=torch.contiguous_format)
    dweight, dbias = (x.new_empty(N, dtype=torch.float32) for _ in range(2))
    launch(
        linear_norm_sums_kernel, (widths["BLOCK_D"] // COLUMNS.value,),
        projection, weight, shares.sum(0), dprojection, dweight, dbias,
        **widths, HAS_WEIGHT=weight is not None, num_warps=2,
    )  # fmt: skip
    return dx, dprojection, dweight, dbias


@_backward.register_fake
def _(dy, x, projection, weight, scales):
    of_features = x.new_empty(projection.shape[0], dtype=torch.float32)
    matrix = torch.empty_like(projection, dtype=torch.float32, memory_format=torch.contiguous_format)
    return torch.empty_like(x), matrix, of_features, torch.empty_like(of_features)


def _setup(ctx, inputs, output):
    x, projection, weight, bias, _ = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(x, projection, weight, output[1])
    ctx.set_materialize_grads(False)


def _autograd(ctx, dy, _):
    if dy is None:
        return None, None, None, None, None
    x, projection, weight, scales = ctx.saved_tensors
    dx, dprojection, dweight, dbias = _backward(dy.contiguous(), x, projection, weight, scales)
    dprojection = dprojection.to(projection.dtype)
    return dx, dprojection, None if weight is None else dweight, dbias if ctx.has_bias else None, None


_operator.register_autograd(_autograd, setup_context=_setup)


def linear_norm(x: Tensor, projection: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """layer_norm of x [..., D] @ projection.T, projection [N, D] in the dtype of x, fp32 or bf16; differentiable once.

    Products of fp32 are in TF32. D is at most MAX_FEATURES and N at most MAX_WIDTH.
    """
    y, _ = call_operator(_operator, _forward, x.contiguous(), projection.contiguous(), weight, bias, eps)
    return y
