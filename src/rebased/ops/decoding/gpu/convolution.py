# mypy: allow-untyped-defs
"""The gated short convolution of a decoding step on a GPU: norm, gate, convolution, its state and the residual."""

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from rebased.ops.decoding import reference
from rebased.ops.decoding.gpu.linear import (
    choose_tile,
    constants_of,
    grid_of,
    normalise_and_shift_,
    product,
    read_normalised,
    roundoff_of,
    row_statistics,
)
from rebased.ops.kernel_launch import launch
from rebased.ops.self_check import checked

if TYPE_CHECKING:
    from rebased.ops.decoding.norm import Norm

MAX_ROWS = 64  # beyond, torch multiplies: three kernels are then faster than one
ROWS, CHANNELS = 4, 256  # per program, where torch multiplies


@triton.jit
def convolve_(state, y, taps, taps_bias, rows, columns, mask, K, W: tl.constexpr, HAS_BIAS: tl.constexpr):
    """The convolution of y [BM, BN] after its state [M, W-1, K], which is moved by one token. taps [K, W]."""
    channels = columns[None, :]
    known = channels < K
    total = y * tl.load(taps + channels * W + (W - 1), mask=known, other=0.0).to(tl.float32)
    if HAS_BIAS:
        total += tl.load(taps_bias + channels, mask=known, other=0.0).to(tl.float32)
    at = state + rows[:, None] * (W - 1) * K + channels
    for w in tl.static_range(W - 1):
        tap = tl.load(taps + channels * W + w, mask=known, other=0.0).to(tl.float32)
        total += tap * tl.load(at + w * K, mask=mask, other=0.0).to(tl.float32)
    for w in tl.static_range(W - 2):
        tl.debug_barrier()  # what a thread writes another one may still have to read
        tl.store(at + w * K, tl.load(at + (w + 1) * K, mask=mask, other=0.0), mask=mask)
    if W > 1:
        tl.debug_barrier()
        tl.store(at + (W - 2) * K, y.to(state.dtype.element_ty), mask=mask)
    return total


@triton.jit
def gated_kernel(
    x, weight, bias, gamma, beta, taps, taps_bias, state, out, M, eps,
    W: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_TAPS_BIAS: tl.constexpr,
    K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
    NORM: tl.constexpr, CENTRE: tl.constexpr, HAS_GAMMA: tl.constexpr, HAS_BETA: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """out [M, K] = x + conv(y) * (y weight^T + bias) + y, y = norm(x); x [M, K], state [M, W-1, K]."""
    columns = (tl.program_id(0) * BN + tl.arange(0, BN)).to(tl.int64)
    rows = (tl.program_id(1) * BM + tl.arange(0, BM)).to(tl.int64)
    inside, within = rows < M, columns < K
    mean, inverse = row_statistics(x, rows, inside, eps, K, BM, BK, CENTRE)
    gate = product(
        x, weight, gamma, beta, rows, inside, columns, within, mean, inverse,
        K, BM, BN, BK, STAGES, NORM, HAS_GAMMA, HAS_BETA, PRECISION,
    )  # fmt: skip
    if HAS_BIAS:
        gate += tl.load(bias + columns, mask=within, other=0.0).to(tl.float32)[None, :]
    y = read_normalised(x, gamma, beta, rows, inside, columns, mean, inverse, K, NORM, HAS_GAMMA, HAS_BETA)
    y = y.to(state.dtype.element_ty).to(tl.float32)  # as later tokens will read it
    mask = inside[:, None] & within[None, :]
    mixed = convolve_(state, y, taps, taps_bias, rows, columns, mask, K, W, HAS_TAPS_BIAS)
    at = rows[:, None] * K + columns[None, :]
    given = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + at, (given + mixed * gate + y).to(out.dtype.element_ty), mask=mask)


@triton.jit
def gate_kernel(
    x, y, gate, taps, taps_bias, state, out, M, K,
    W: tl.constexpr, HAS_TAPS_BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The same with y and its gate [M, K] given."""
    columns = (tl.program_id(0) * BN + tl.arange(0, BN)).to(tl.int64)
    rows = (tl.program_id(1) * BM + tl.arange(0, BM)).to(tl.int64)
    at = rows[:, None] * K + columns[None, :]
    mask = (rows < M)[:, None] & (columns < K)[None, :]
    own = tl.load(y + at, mask=mask, other=0.0).to(tl.float32)
    mixed = convolve_(state, own, taps, taps_bias, rows, columns, mask, K, W, HAS_TAPS_BIAS)
    total = tl.load(x + at, mask=mask, other=0.0).to(tl.float32) + own
    total += mixed * tl.load(gate + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=mask)


@checked(reference.gated_conv_, roundoff=roundoff_of)
def gated_conv_(
    x: Tensor, norm: "Norm", weight: Tensor, bias: Tensor | None, taps: Tensor, taps_bias: Tensor | None, state: Tensor
) -> Tensor:
    """See api.gated_conv_step_."""
    (M, K), W = x.shape, taps.shape[1]
    out, x, taps = x.new_empty(M, K), x.contiguous(), taps.contiguous()
    if M <= MAX_ROWS and norm.kind != "none":
        tile = choose_tile(M, K, K, x.element_size())
        launch(
            gated_kernel, grid_of(M, K, tile),
            x, weight.contiguous(), bias, norm.weight, norm.bias, taps, taps_bias, state, out, M, norm.eps,
            W=W, HAS_BIAS=bias is not None, HAS_TAPS_BIAS=taps_bias is not None, **constants_of(x, norm, tile),
            overwrites=(state,),
        )  # fmt: skip
        return out
    y = normalise_and_shift_(x, norm, None)
    launch(
        gate_kernel, (triton.cdiv(K, CHANNELS), triton.cdiv(M, ROWS)),
        x, y, functional.linear(y, weight, bias), taps, taps_bias, state, out, M, K,
        W=W, HAS_TAPS_BIAS=taps_bias is not None, BM=ROWS, BN=CHANNELS, num_warps=4, overwrites=(state,),
    )  # fmt: skip
    return out
