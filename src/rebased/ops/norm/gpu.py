# mypy: allow-untyped-defs
"""Norms on a GPU: many rows per program, each number read once and written once, in any float dtype.

The backward computes mean and deviation again from x, which it reads anyway. Its programs loop over the rows and keep
their share of the gradients of weight and bias in registers. The shares are then added in a fixed order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rebased.ops.comparison import differentiate, pick, row_slices, some
from rebased.ops.kernel_launch import call_operator, launch
from rebased.ops.norm import reference
from rebased.ops.self_check import checked

TILE = 4096  # numbers of each tensor that a program holds
PROGRAMS = 1024  # of the backward, at most


@triton.jit
def standardise(x, inside, N, eps, CENTRE: tl.constexpr):
    """x [ROWS, WIDTH] standardised, with zeros outside of the N features; and 1 / deviation [ROWS, 1]."""
    if CENTRE:
        x = tl.where(inside, x - (tl.sum(x, 1) / N)[:, None], 0.0)
    scale = (1.0 / tl.sqrt(tl.sum(x * x, 1) / N + eps))[:, None]
    return x * scale, scale


@triton.jit
def locate(tile, M, N, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """The offsets [ROWS, WIDTH] of a tile in [M, N], the mask of those inside, and the columns [1, WIDTH]."""
    rows = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    columns = tl.arange(0, WIDTH)[None, :]
    return rows * N + columns, (rows < M) & (columns < N), columns


@triton.jit
def forward_kernel(
    x, weight, bias, y, M, eps,
    N: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, CENTRE: tl.constexpr, RESIDUAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """y [M, N] of x [M, N], weight [N] and bias [N]; one tile of ROWS rows per program."""
    at, inside, columns = locate(tl.program_id(0), M, N, ROWS, WIDTH)
    given = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    out, _ = standardise(given, inside, N, eps, CENTRE)
    if HAS_WEIGHT:
        out *= tl.load(weight + columns, mask=columns < N, other=0.0).to(tl.float32)
    if HAS_BIAS:
        out += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)
    if RESIDUAL:
        out += given
    tl.store(y + at, out.to(y.dtype.element_ty), mask=inside)


@triton.jit
def backward_kernel(
    x, weight, dy, dx, dweight, dbias, M, eps, tiles,
    N: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, CENTRE: tl.constexpr, RESIDUAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
):  # fmt: skip
    """dx [M, N], and each program's share of dweight and dbias [programs, N]."""
    columns = tl.arange(0, WIDTH)[None, :]
    gain = tl.full([1, WIDTH], 1.0, tl.float32)
    if HAS_WEIGHT:
        gain = tl.load(weight + columns, mask=columns < N, other=0.0).to(tl.float32)
    gains = tl.zeros([1, WIDTH], tl.float32)
    shifts = tl.zeros([1, WIDTH], tl.float32)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        at, inside, _ = locate(tile, M, N, ROWS, WIDTH)
        given = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        out = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
        standard, scale = standardise(given, inside, N, eps, CENTRE)
        gains += tl.sum(out * standard, 0)[None, :]
        shifts += tl.sum(out, 0)[None, :]
        inner = out * gain
        into = inner - standard * (tl.sum(inner * standard, 1) / N)[:, None]
        if CENTRE:
            into -= (tl.sum(inner, 1) / N)[:, None]
        into *= scale
        if RESIDUAL:
            into += out
        tl.store(dx + at, into.to(dx.dtype.element_ty), mask=inside)
    share = tl.program_id(0) * N + columns
    tl.store(dweight + share, gains, mask=columns < N)
    tl.store(dbias + share, shifts, mask=columns < N)


def _sizes(x: Tensor) -> tuple[int, dict[str, int]]:
    """The number of rows M and the constants of a kernel. N, the number of features, is one of them, so that rows of 24
    or 48 numbers, too, are read four numbers at once."""
    N = x.shape[-1]
    width = triton.next_power_of_2(N)
    rows, warps = max(1, TILE // width), 4 if width <= TILE else 8
    return x.numel() // N, {"N": N, "ROWS": rows, "WIDTH": width, "num_warps": warps}


def _some_rows(args, results):
    x, *others = args
    x, y = (each.reshape(-1, x.shape[-1]) for each in (x, results[0]))
    numbers = some(len(x), 256, every=64)
    return (pick(x, 0, numbers), *others), pick(y, 0, numbers)


@checked(reference.norm, sample=_some_rows)
def _forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, dtype: torch.dtype, centre: bool, residual: bool
) -> Tensor:
    M, sizes = _sizes(x)
    y = torch.empty_like(x, dtype=dtype)
    launch(
        forward_kernel, (triton.cdiv(M, sizes["ROWS"]),),
        x, weight, bias, y, M, eps, CENTRE=centre, RESIDUAL=residual,
        HAS_WEIGHT=weight is not None, HAS_BIAS=bias is not None, **sizes,
    )  # fmt: skip
    return y


_operator = torch.library.custom_op("rebased::norm", _forward, mutates_args=())


@_operator.register_fake
def _(x, weight, bias, eps, dtype, centre, residual):
    return torch.empty_like(x, dtype=dtype)


def _backward_in_torch(dy, x, weight, eps, centre, residual):
    """As _backward."""
    ones = x.new_ones(x.shape[-1], dtype=torch.promote_types(x.dtype, torch.float32))

    def forward(x, weight, bias):
        y = reference.norm(x, weight, bias if centre else None, eps, dy.dtype, centre, residual)
        return y if centre else y + bias

    dx, dweight, dbias = differentiate(forward, (x, ones if weight is None else weight, torch.zeros_like(ones)), dy)
    return dx, torch.stack([dweight.to(ones.dtype), dbias])


def _all_rows(args, results):
    dy, x, *others = args
    dy, x, dx = (each.reshape(-1, x.shape[-1]) for each in (dy, x, results[0]))
    for rows in row_slices(*x.shape):
        yield (dy[rows], x[rows], *others), dx[rows]


@torch.library.custom_op("rebased::norm_backward", mutates_args=())
@checked(_backward_in_torch, slices=_all_rows)
def _backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, eps: float, centre: bool, residual: bool
) -> tuple[Tensor, Tensor]:
    """dx, and dweight and dbias as one tensor [2, N]."""
    M, sizes = _sizes(x)
    tiles = triton.cdiv(M, sizes["ROWS"])
    programs = min(tiles, PROGRAMS)
    dx = torch.empty_like(x)
    shares = x.new_empty(2, programs, x.shape[-1], dtype=torch.float32)
    launch(
        backward_kernel, (programs,),
        x, weight, dy, dx, *shares, M, eps, tiles,
        CENTRE=centre, RESIDUAL=residual, HAS_WEIGHT=weight is not None, **sizes,
    )  # fmt: skip
    return dx, shares.sum(1)


@_backward.register_fake
def _(dy, x, weight, eps, centre, residual):
    return torch.empty_like(x), x.new_empty(2, x.shape[-1], dtype=torch.float32)


def _setup(ctx, inputs, output):
    x, weight, bias, ctx.eps, _, ctx.centre, ctx.residual = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(x, weight)


def _autograd(ctx, dy):
    x, weight = ctx.saved_tensors
    dx, (dweight, dbias) = _backward(dy.contiguous(), x, weight, ctx.eps, ctx.centre, ctx.residual)
    return dx, None if weight is None else dweight, dbias if ctx.has_bias else None, None, None, None, None


_operator.register_autograd(_autograd, setup_context=_setup)


def norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, dtype: torch.dtype, centre: bool, residual: bool
) -> Tensor:
    """layer_norm (centre) or rms_norm of x [..., D] in `dtype`; weight and bias [D] or None. Differentiable once."""
    return call_operator(_operator, _forward, x.contiguous(), weight, bias, eps, dtype, centre, residual)
