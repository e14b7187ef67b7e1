# mypy: allow-untyped-defs
"""A narrow projection and the norm of its output in one kernel, so that the output is written once and never read.

The backward projects again: where x has a few dozen features and its projection a few hundred, that is less work than
to read the projection. Its programs loop over rows, and keep their share of the gradients of the weights in registers.
The shares are then added in a fixed order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rebased.ops.kernel_launch import launch
from rebased.ops.norm.gpu import _locate, _standardise

MAX_FEATURES = 64
"""The largest D: the gradient of the projection, [D, N], stays in registers."""
MAX_WIDTH = 256
"""The largest N: a row of the projection stays in registers."""

ROWS, BACKWARD_ROWS, WIDE_BACKWARD_ROWS = 32, 32, 16  # of a tile; the last where D is above 32
PROGRAMS = 264  # at most: two for each multiprocessor


@triton.jit
def _load(x, tile, M, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr):
    """A tile [ROWS, BLOCK_D] of x [M, D], with zeros outside."""
    at, inside, _ = _locate(tile, M, D, ROWS, BLOCK_D)
    return tl.load(x + at, mask=inside, other=0.0)


@triton.jit
def linear_norm_kernel(
    x, projection, weight, bias, y, M, eps, tiles,
    D: tl.constexpr, N: tl.constexpr, BLOCK_D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """y [M, N], the norm of x projection^T; x [M, D], projection [N, D], weight and bias [N]."""
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
        at, inside, _ = _locate(tile, M, N, ROWS, WIDTH)
        standard, _ = _standardise(projected, inside, N, eps, True)
        tl.store(y + at, (standard * gain + shift).to(y.dtype.element_ty), mask=inside)


@triton.jit
def linear_norm_backward_kernel(
    x, projection, weight, dy, dx, dprojection, dweight, dbias, M, eps, tiles,
    D: tl.constexpr, N: tl.constexpr, BLOCK_D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
):  # fmt: skip
    """dx [M, D], and each program's share of dprojection [programs, D, N], dweight and dbias [programs, N]."""
    matrix = _load(projection, 0, N, D, BLOCK_D, WIDTH)
    columns = tl.arange(0, WIDTH)[None, :]
    gain = tl.full([1, WIDTH], 1.0, tl.float32)
    if HAS_WEIGHT:
        gain = tl.load(weight + columns, mask=columns < N, other=0.0).to(tl.float32)
    gains = tl.zeros([1, WIDTH], tl.float32)
    shifts = tl.zeros([1, WIDTH], tl.float32)
    matrices = tl.zeros([BLOCK_D, WIDTH], tl.float32)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        given = _load(x, tile, M, D, BLOCK_D, ROWS)
        projected = tl.dot(given, tl.trans(matrix), input_precision="tf32")
        at, inside, _ = _locate(tile, M, N, ROWS, WIDTH)
        out = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
        standard, scale = _standardise(projected, inside, N, eps, True)
        gains += tl.sum(out * standard, 0)[None, :]
        shifts += tl.sum(out, 0)[None, :]
        inner = out * gain
        into = inner - standard * (tl.sum(inner * standard, 1) / N)[:, None] - (tl.sum(inner, 1) / N)[:, None]
        into = tl.where(inside, into * scale, 0.0).to(given.dtype)
        back = tl.dot(into, matrix, input_precision="tf32")
        x_at, x_inside, _ = _locate(tile, M, D, ROWS, BLOCK_D)
        tl.store(dx + x_at, back.to(dx.dtype.element_ty), mask=x_inside)
        matrices = tl.dot(tl.trans(given), into, matrices, input_precision="tf32")
    place, within, _ = _locate(0, D, N, BLOCK_D, WIDTH)
    tl.store(dprojection + tl.program_id(0) * (D * N) + place, matrices, mask=within)
    share = tl.program_id(0) * N + columns
    tl.store(dweight + share, gains, mask=columns < N)
    tl.store(dbias + share, shifts, mask=columns < N)


def _sizes(x: Tensor, projection: Tensor, rows: int) -> tuple[int, int, dict[str, int]]:
    """The number of rows M, of tiles, and the constants of a kernel."""
    N, D = projection.shape
    M = x.numel() // D
    widths = {"BLOCK_D": max(16, triton.next_power_of_2(D)), "WIDTH": max(16, triton.next_power_of_2(N))}
    return M, triton.cdiv(M, rows), {"D": D, "N": N, **widths, "ROWS": rows, "num_warps": 8, "num_stages": 2}


@torch.library.custom_op("rebased::linear_norm", mutates_args=())
def _forward(x: Tensor, projection: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    M, tiles, sizes = _sizes(x, projection, ROWS)
    y = x.new_empty(*x.shape[:-1], len(projection))
    launch(
        linear_norm_kernel, (min(tiles, PROGRAMS),),
        x, projection, weight, bias, y, M, eps, tiles,
        HAS_WEIGHT=weight is not None, HAS_BIAS=bias is not None, **sizes,
    )  # fmt: skip
    return y


@_forward.register_fake
def _(x, projection, weight, bias, eps):
    return x.new_empty(*x.shape[:-1], projection.shape[0])


@torch.library.custom_op("rebased::linear_norm_backward", mutates_args=())
def _backward(
    dy: Tensor, x: Tensor, projection: Tensor, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    N, D = projection.shape
    M, tiles, sizes = _sizes(x, projection, BACKWARD_ROWS if D <= 32 else WIDE_BACKWARD_ROWS)
    programs = min(tiles, PROGRAMS)
    dx = torch.empty_like(x)
    dprojection, dweight, dbias = (x.new_empty(programs, *shape, dtype=torch.float32) for shape in ((D, N), (N,), (N,)))
    launch(
        linear_norm_backward_kernel, (programs,),
        x, projection, weight, dy, dx, dprojection, dweight, dbias, M, eps, tiles,
        HAS_WEIGHT=weight is not None, **sizes,
    )  # fmt: skip
    return dx, dprojection.sum(0).t().contiguous(), dweight.sum(0), dbias.sum(0)


@_backward.register_fake
def _(dy, x, projection, weight, eps):
    of_features = x.new_empty(projection.shape[0], dtype=torch.float32)
    matrix = torch.empty_like(projection, dtype=torch.float32, memory_format=torch.contiguous_format)
    return torch.empty_like(x), matrix, of_features, torch.empty_like(of_features)


def _setup(ctx, inputs, output):
    x, projection, weight, bias, ctx.eps = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(x, projection, weight)


def _autograd(ctx, dy):
    x, projection, weight = ctx.saved_tensors
    dx, dprojection, dweight, dbias = _backward(dy.contiguous(), x, projection, weight, ctx.eps)
    dprojection = dprojection.to(projection.dtype)
    return dx, dprojection, None if weight is None else dweight, dbias if ctx.has_bias else None, None


_forward.register_autograd(_autograd, setup_context=_setup)


def linear_norm(x: Tensor, projection: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """layer_norm of x [..., D] @ projection.T, projection [N, D] in the dtype of x, fp32 or bf16; differentiable once.

    Products of fp32 are in TF32. D is at most MAX_FEATURES and N at most MAX_WIDTH.
    """
    return _forward(x.contiguous(), projection.contiguous(), weight, bias, eps)
