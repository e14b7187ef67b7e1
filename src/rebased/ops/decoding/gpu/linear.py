# mypy: allow-untyped-defs
"""The linear layers of a decoding step on a GPU: norm, product, bias, activation and residual in one kernel.

A program makes a tile [BM, BN] of the result. It computes mean and deviation of its rows itself: they are short, and
a kernel of their own would take longer. One row is multiplied without tensor cores, in fp32.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from rebased.ops.comparison import FP32, ROUNDOFF, pick, some
from rebased.ops.decoding import reference
from rebased.ops.decoding.reference import normalise
from rebased.ops.kernel_launch import launch
from rebased.ops.norm.api import MAX_FEATURES
from rebased.ops.self_check import checked

if TYPE_CHECKING:
    from rebased.ops.decoding.norm import Norm

MAX_ROWS = 16  # beyond, torch's products are faster
MAX_COLUMNS = 8192  # of a product of more than one row; beyond, torch's is as fast


class Tile(NamedTuple):
    """The part of a result that a program makes, and how it reads."""

    BM: int  # rows; 1: without tensor cores
    BN: int  # columns
    BK: int  # features that are read at a time
    STAGES: int
    num_warps: int


@triton.jit
def row_statistics(x, rows, inside, eps, K: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, CENTRE: tl.constexpr):
    """Mean (0 without CENTRE) and 1 / deviation, [BM] each, of these rows of x [M, K].

    Threads exchange numbers only once per sum, at its end.
    """
    at = x + rows[:, None] * K
    mean = tl.zeros([BM], tl.float32)
    if CENTRE:
        total = tl.zeros([BM, BK], tl.float32)
        for start in range(0, K, BK):
            columns = (start + tl.arange(0, BK))[None, :]
            total += tl.load(at + columns, mask=inside[:, None] & (columns < K), other=0.0).to(tl.float32)
        mean = tl.sum(total, 1) / K
    squares = tl.zeros([BM, BK], tl.float32)
    for start in range(0, K, BK):
        columns = (start + tl.arange(0, BK))[None, :]
        mask = inside[:, None] & (columns < K)
        given = tl.load(at + columns, mask=mask, other=0.0).to(tl.float32)
        given = tl.where(mask, given - mean[:, None], 0.0)
        squares += given * given
    return mean, 1.0 / tl.sqrt(tl.sum(squares, 1) / K + eps)


@triton.jit
def scaled(given, gamma, beta, columns, mask, HAS_GAMMA: tl.constexpr, HAS_BETA: tl.constexpr):
    """given * gamma + beta at these columns."""
    if HAS_GAMMA:
        given *= tl.load(gamma + columns, mask=mask, other=0.0).to(tl.float32)
    if HAS_BETA:
        given += tl.load(beta + columns, mask=mask, other=0.0).to(tl.float32)
    return given


@triton.jit
def read_normalised(
    x, gamma, beta, rows, inside, columns, mean, inverse,
    K: tl.constexpr, NORM: tl.constexpr, HAS_GAMMA: tl.constexpr, HAS_BETA: tl.constexpr,
):  # fmt: skip
    """The norm of x [M, K] at rows [BM] and columns [BK], [BM, BK] in fp32; zeros outside. NORM: there is one."""
    columns = columns[None, :]
    mask = inside[:, None] & (columns < K)
    given = tl.load(x + rows[:, None] * K + columns, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        given = scaled((given - mean[:, None]) * inverse[:, None], gamma, beta, columns, columns < K,
                       HAS_GAMMA, HAS_BETA)  # fmt: skip
        given = tl.where(mask, given, 0.0)
    return given


@triton.jit
def product(
    x, weight, gamma, beta, rows, inside, columns, within, mean, inverse,
    K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
    NORM: tl.constexpr, HAS_GAMMA: tl.constexpr, HAS_BETA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """norm(x) weight^T at rows [BM] and columns [BN]: [BM, BN] in fp32; x [M, K], weight [N, K]."""
    if BM == 1:
        products = tl.zeros([BN, BK], tl.float32)
        for start in tl.range(0, K, BK, num_stages=STAGES):
            k = start + tl.arange(0, BK)
            row = read_normalised(x, gamma, beta, rows, inside, k, mean, inverse, K, NORM, HAS_GAMMA, HAS_BETA)
            mask = within[:, None] & (k < K)[None, :]
            w = tl.load(weight + columns[:, None] * K + k[None, :], mask=mask, other=0.0)
            row = row.to(w.dtype).to(tl.float32)
            products += row * w.to(tl.float32)
        total = tl.sum(products, 1)[None, :]
    else:
        total = tl.zeros([BM, BN], tl.float32)
        for start in tl.range(0, K, BK, num_stages=STAGES):
            k = start + tl.arange(0, BK)
            tile = read_normalised(x, gamma, beta, rows, inside, k, mean, inverse, K, NORM, HAS_GAMMA, HAS_BETA)
            mask = within[None, :] & (k < K)[:, None]
            w = tl.load(weight + columns[None, :] * K + k[:, None], mask=mask, other=0.0)
            total = tl.dot(tile.to(w.dtype), w, total, input_precision=PRECISION)
    return total


@triton.jit
def linear_kernel(
    x, weight, bias, gamma, beta, residual, y, M, N, eps,
    K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
    NORM: tl.constexpr, CENTRE: tl.constexpr, HAS_GAMMA: tl.constexpr, HAS_BETA: tl.constexpr,
    HAS_BIAS: tl.constexpr, GELU: tl.constexpr, HAS_RESIDUAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """y [M, N] of x [M, K] and weight [N, K]: residual + gelu(norm(x) weight^T + bias), each part optional."""
    columns = (tl.program_id(0) * BN + tl.arange(0, BN)).to(tl.int64)
    rows = (tl.program_id(1) * BM + tl.arange(0, BM)).to(tl.int64)
    inside, within = rows < M, columns < N
    mean = tl.zeros([BM], tl.float32)
    inverse = tl.zeros([BM], tl.float32)
    if NORM:
        mean, inverse = row_statistics(x, rows, inside, eps, K, BM, BK, CENTRE)
    out = product(
        x, weight, gamma, beta, rows, inside, columns, within, mean, inverse,
        K, BM, BN, BK, STAGES, NORM, HAS_GAMMA, HAS_BETA, PRECISION,
    )  # fmt: skip
    if HAS_BIAS:
        out += tl.load(bias + columns, mask=within, other=0.0).to(tl.float32)[None, :]
    if GELU:
        out = 0.5 * out * (1.0 + tl.erf(out * 0.7071067811865476))
    at = rows[:, None] * N + columns[None, :]
    mask = inside[:, None] & within[None, :]
    if HAS_RESIDUAL:
        out += tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + at, out.to(y.dtype.element_ty), mask=mask)


@triton.jit
def norm_kernel(
    x, gamma, beta, shift, y, eps,
    K: tl.constexpr, WIDTH: tl.constexpr, CENTRE: tl.constexpr, HAS_GAMMA: tl.constexpr, HAS_BETA: tl.constexpr,
    HAS_SHIFT: tl.constexpr,
):  # fmt: skip
    """y [M, K] = norm(x), then x [M, K] += shift; one program per row."""
    columns = tl.arange(0, WIDTH)
    mask = columns < K
    at = tl.program_id(0).to(tl.int64) * K + columns
    given = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    if HAS_SHIFT:
        moved = given + tl.load(shift + columns, mask=mask, other=0.0).to(tl.float32)
        tl.store(x + at, moved.to(x.dtype.element_ty), mask=mask)
    if CENTRE:
        given = tl.where(mask, given - tl.sum(given, 0) / K, 0.0)
    given = given / tl.sqrt(tl.sum(given * given, 0) / K + eps)
    given = scaled(given, gamma, beta, columns, mask, HAS_GAMMA, HAS_BETA)
    tl.store(y + at, given.to(y.dtype.element_ty), mask=mask)


def _shift_in_torch(x, norm, shift):
    """As normalise_and_shift_."""
    y = normalise(x, norm)
    if shift is not None:
        x.add_(shift)
    return y


@checked(_shift_in_torch)
def normalise_and_shift_(x: Tensor, norm: "Norm", shift: Tensor | None) -> Tensor:
    """norm(x) of x [M, K] contiguous; then x becomes x + shift, where `shift` [K] is what a later product will add."""
    if norm.kind == "none" or x.shape[1] > MAX_FEATURES:
        y = normalise(x, norm)
        if shift is not None:
            x.add_(shift)
        return y
    y, width = torch.empty_like(x), triton.next_power_of_2(x.shape[1])
    launch(
        norm_kernel, (len(x),),
        x, norm.weight, norm.bias, shift, y, norm.eps,
        K=x.shape[1], WIDTH=width, CENTRE=norm.kind == "layer", HAS_GAMMA=norm.weight is not None,
        HAS_BETA=norm.bias is not None, HAS_SHIFT=shift is not None, num_warps=max(1, min(8, width // 256)),
        overwrites=() if shift is None else (x,),
    )  # fmt: skip
    return y


def choose_tile(rows: int, columns: int, features: int, itemsize: int) -> Tile:
    """The tile of a product [rows, features] x [features, columns]: some hundred programs, each with much in flight."""
    if rows == 1:
        wide = min(1024, triton.next_power_of_2(features))
        if columns <= 4096:
            return Tile(1, 4 if columns <= 1024 else 8, wide, 3, 4)
        return Tile(1, 16, wide, 2, 8)
    deep = max(16, min(512 // itemsize, triton.next_power_of_2(features)))
    high = 16 if rows <= 32 else 32
    return Tile(high, 16 if columns <= 2048 else 32, deep, 4, 4)


def constants_of(x: Tensor, norm: "Norm | None", tile: Tile) -> dict[str, Any]:
    """The constants of a kernel that multiplies norm(x), x [M, K], by tiles."""
    gamma, beta, _, kind = (None, None, 0.0, None) if norm is None else norm
    return {
        "K": x.shape[1], **tile._asdict(), "NORM": kind is not None, "CENTRE": kind == "layer",
        "HAS_GAMMA": gamma is not None, "HAS_BETA": beta is not None, "PRECISION": "ieee",
    }  # fmt: skip


def grid_of(rows: int, columns: int, tile: Tile) -> tuple[int, int]:
    """One program per tile of the result."""
    return triton.cdiv(columns, tile.BN), triton.cdiv(rows, tile.BM)


def fits(rows: int, columns: int) -> bool:
    """True if the kernels multiply so many rows by so many columns of weights; otherwise torch does."""
    return rows == 1 or (rows <= MAX_ROWS and columns <= MAX_COLUMNS)


def _some_columns(args, results):
    x, weight, bias, norm, gelu, residual, _ = args
    numbers = some(len(weight), 256, every=64)
    small = (x, pick(weight, 0, numbers), pick(bias, 0, numbers), norm, gelu, pick(residual, 1, numbers), None)
    return small, pick(results[0], 1, numbers)


def roundoff_of(x, *_):
    """Of a product with x: half precision is rounded after the norm, fp32 is multiplied as it is."""
    return FP32 if x.dtype == torch.float32 else ROUNDOFF[x.dtype]


@checked(reference.linear, sample=_some_columns, roundoff=roundoff_of)
def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: "Norm | None",
    gelu: bool,
    residual: Tensor | None,
    out: Tensor | None,
) -> Tensor:
    """See api.linear_step. `residual` is overwritten where torch multiplies."""
    (M, K), N = x.shape, weight.shape[0]
    if norm is not None and norm.kind == "none":
        x, norm = normalise(x, norm), None
    if not fits(M, N):
        return _by_torch(x, weight, bias, norm, gelu, residual, out)
    y = x.new_empty(M, N) if out is None else out
    tile = choose_tile(M, N, K, x.element_size())
    gamma, beta, eps = (None, None, 0.0) if norm is None else norm[:3]
    launch(
        linear_kernel, grid_of(M, N, tile),
        x.contiguous(), weight.contiguous(), bias, gamma, beta, residual, y, M, N, eps,
        HAS_BIAS=bias is not None, GELU=gelu, HAS_RESIDUAL=residual is not None, **constants_of(x, norm, tile),
    )  # fmt: skip
    return y


def mlp(
    x: Tensor, norm: "Norm", weight1: Tensor, bias1: Tensor | None, weight2: Tensor, bias2: Tensor | None
) -> Tensor:
    """See api.mlp_step. Where torch multiplies, its product adds to x, to which the norm's kernel adds the bias."""
    if fits(len(x), len(weight1)) and fits(*x.shape):
        return linear(linear(x, weight1, bias1, norm, True, None, None), weight2, bias2, None, False, x, None)
    x = x.contiguous()
    y = normalise_and_shift_(x, norm, bias2)
    return x.addmm_(functional.gelu(functional.linear(y, weight1, bias1)), weight2.t())


def _by_torch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: "Norm | None",
    gelu: bool,
    residual: Tensor | None,
    out: Tensor | None,
) -> Tensor:
    x = x if norm is None else normalise_and_shift_(x.contiguous(), norm, None)
    if residual is not None and not gelu and out is None:  # the product adds to what is there: no further kernel
        return (residual if bias is None else residual.add_(bias)).addmm_(x, weight.t())
    if out is not None and bias is None and not gelu and residual is None:
        return torch.mm(x, weight.t(), out=out)
    y = functional.linear(x, weight, bias)
    y = functional.gelu(y) if gelu else y
    y = y if residual is None else y.add_(residual)
    return y if out is None else out.copy_(y)
