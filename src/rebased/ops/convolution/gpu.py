# mypy: allow-untyped-defs
"""The short convolution on a GPU: each tensor is read once and written once, forward and backward.

In plain torch every tap is one pass over memory, about 40 passes with the gradients. Here there are five: x and y,
then x, dy and dx. With silu after the convolution there are five too, where torch's silu takes five of its own: the
backward computes the convolution again. There a program walks along short runs of tokens, with all that neighbours
share in registers.

Widths and strides are constants of the kernels, so that rows of 24 or 48 numbers, too, are read four numbers at once.
"""

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from rebased.ops.comparison import differentiate, some_channels
from rebased.ops.convolution.chunked import shifted_sum
from rebased.ops.kernel_launch import call_operator, launch, strided_rows
from rebased.ops.self_check import checked

TILE, CHANNELS, WARPS = 2048, 64, 4  # per program: tokens times channels; channels at most
BACKWARD_WARPS = 2  # sums over tokens wait for every warp: with four the kernel takes twice as long
RUN, RUN_WARPS = 8, 2  # of the backward with silu: tokens of a run, a power of 2; warps per program
MOST_TAPS = 6  # with silu inside the kernels: the inputs of a run are in registers


@triton.jit
def _locate(T, TOKENS: tl.constexpr, CHANNELS: tl.constexpr):
    """The batch row, the tokens [TOKENS, 1] and the channels [1, CHANNELS] of this program."""
    row = tl.program_id(2).to(tl.int64)
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)[:, None]
    return row, tokens, tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]


@triton.jit
def _load_seen(x, state, p, channels, mask, D: tl.constexpr, STRIDE: tl.constexpr, W: tl.constexpr):
    """Input p of a sequence. The W - 1 inputs before the first token come from the state.

    STRIDE: how far apart two tokens of x are in memory.
    """
    here = tl.load(x + p * STRIDE + channels, mask=mask & (p >= 0), other=0.0).to(tl.float32)
    before = tl.load(state + (p + W - 1) * D + channels, mask=mask & (p < 0), other=0.0).to(tl.float32)
    return tl.where(p < 0, before, here)


@triton.jit
def forward_kernel(
    x, state, weight, bias, y, T,
    D: tl.constexpr, STRIDE: tl.constexpr, W: tl.constexpr, SILU: tl.constexpr,
    TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """y_t = bias + sum_w weight[w] seen_{t-(W-1)+w}: x, y [B, T, D], state [B, W-1, D], weight [W, D], bias [D].

    SILU: silu of that. STRIDE: how far apart two tokens of x are in memory.
    """
    row, tokens, channels = _locate(T, TOKENS, CHANNELS)
    x, state = x + row * T * STRIDE, state + row * (W - 1) * D
    mask = (tokens < T) & (channels < D)
    acc = tl.load(bias + channels, mask=channels < D, other=0.0) + tl.zeros([TOKENS, CHANNELS], tl.float32)
    for w in tl.static_range(W):
        tap = tl.load(weight + w * D + channels, mask=channels < D, other=0.0)
        acc += tap * _load_seen(x, state, tokens - (W - 1) + w, channels, mask, D, STRIDE, W)
    if SILU:
        acc *= tl.sigmoid(acc)
    tl.store(y + row * T * D + tokens * D + channels, acc.to(y.dtype.element_ty), mask=mask)


@triton.jit
def backward_kernel(
    x, state, weight, dy, dx, dstate, sums, T,
    D: tl.constexpr, STRIDE: tl.constexpr, W: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """dx, dstate, and sums [B, tiles, W+1, D]: the share of each tile in dweight and, last, in dbias.

    The tokens of a program are inputs here, including those of the state: input p meets tap w in output p + W - 1 - w.
    """
    row, tokens, channels = _locate(T, TOKENS, CHANNELS)
    p = tokens - (W - 1)
    mask = (p < T) & (channels < D)
    x, state = x + row * T * STRIDE, state + row * (W - 1) * D
    seen = _load_seen(x, state, p, channels, mask, D, STRIDE, W)
    dseen = tl.zeros([TOKENS, CHANNELS], tl.float32)
    sums += (row * tl.num_programs(0) + tl.program_id(0)) * (W + 1) * D
    for w in tl.static_range(W):
        t = p + (W - 1) - w
        within = (t >= 0) & (t < T) & (channels < D)
        out = tl.load(dy + row * T * D + t * D + channels, mask=within, other=0.0).to(tl.float32)
        dseen += tl.load(weight + w * D + channels, mask=channels < D, other=0.0) * out
        tl.store(sums + w * D + channels, tl.sum(seen * out, 0)[None, :], mask=channels < D)
        if w == W - 1:  # here t = p, so every output is added once
            tl.store(sums + W * D + channels, tl.sum(out, 0)[None, :], mask=channels < D)
    tl.store(dx + row * T * D + p * D + channels, dseen.to(dx.dtype.element_ty), mask=mask & (p >= 0))
    at = dstate + row * (W - 1) * D + tokens * D + channels
    tl.store(at, dseen.to(dstate.dtype.element_ty), mask=mask & (p < 0))


@triton.jit
def silu_backward_kernel(
    x, state, weight, bias, dy, dx, dstate, sums, T,
    D: tl.constexpr, STRIDE: tl.constexpr, W: tl.constexpr, RUN: tl.constexpr,
    TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """What backward_kernel computes, for silu of the convolution; arguments as there.

    The tokens of a program are runs of RUN inputs. The outputs that a run meets begin with it and end W - 1 tokens
    after it.
    """
    RUNS: tl.constexpr = TOKENS // RUN
    row, run, channels = _locate(T, RUNS, CHANNELS)
    first = run * RUN - (W - 1)  # input of each run
    x, state, dy, dx = x + row * T * STRIDE, state + row * (W - 1) * D, dy + row * T * D, dx + row * T * D
    dstate += row * (W - 1) * D
    sums += (row * tl.num_programs(0) + tl.program_id(0)) * (W + 1) * D
    exist = channels < D
    taps, totals, seen, gradients = (), (), (), ()
    for w in tl.static_range(W):
        taps += (tl.load(weight + w * D + channels, mask=exist, other=0.0),)  # type: ignore[assignment]
        totals += (tl.zeros([RUNS, CHANNELS], tl.float32),)  # type: ignore[assignment]
    offset = tl.load(bias + channels, mask=exist, other=0.0)
    total = tl.zeros([RUNS, CHANNELS], tl.float32)
    for i in tl.static_range(RUN + 2 * (W - 1)):  # inputs, from W - 1 before the run on
        p = first - (W - 1) + i
        at = tl.where(p < 0, state + (p + W - 1) * D, x + p * STRIDE) + channels
        mask = exist & (p >= 1 - W) & (p < T)
        seen += (tl.load(at, mask=mask, other=0.0).to(tl.float32),)  # type: ignore[assignment]
    for i in tl.static_range(RUN + W - 1):
        t = first + i
        d = tl.load(dy + t * D + channels, mask=exist & (t >= 0) & (t < T), other=0.0).to(tl.float32)
        y = offset
        for w in tl.static_range(W):
            y += taps[w] * seen[i + w]
        s = tl.sigmoid(y)
        gradients += (d * (s + y * s * (1 - s)),)  # type: ignore[assignment]
    for i in tl.static_range(RUN):
        p = first + i
        dseen = tl.zeros([RUNS, CHANNELS], tl.float32)
        products = ()
        for w in tl.static_range(W):
            d = gradients[i + W - 1 - w]
            dseen += taps[w] * d
            products += (totals[w] + seen[i + W - 1] * d,)  # type: ignore[assignment]
        totals = products
        total += gradients[i]
        tl.store(dx + p * D + channels, dseen.to(dx.dtype.element_ty), mask=exist & (p >= 0) & (p < T))
        at = dstate + (p + W - 1) * D + channels
        tl.store(at, dseen.to(dstate.dtype.element_ty), mask=exist & (p < 0))
    for w in tl.static_range(W):
        tl.store(sums + w * D + channels, tl.sum(totals[w], 0)[None, :], mask=exist)
    tl.store(sums + W * D + channels, tl.sum(total, 0)[None, :], mask=exist)


def _constants(D: int, stride: int, taps: int) -> dict[str, int]:
    channels = min(CHANNELS, max(16, triton.next_power_of_2(D)))
    return {"D": D, "STRIDE": stride, "W": taps, "TOKENS": TILE // channels, "CHANNELS": channels}


def _grid(inputs: int, batch: int, constants: dict[str, int]) -> tuple[int, int, int]:
    return triton.cdiv(inputs, constants["TOKENS"]), triton.cdiv(constants["D"], constants["CHANNELS"]), batch


def _in_torch(x, state, weight, bias, silu):
    """As _forward."""
    seen = torch.cat([state, x], dim=1).to(weight.dtype)
    y = shifted_sum(seen, weight.T) + bias
    return (functional.silu(y) if silu else y).to(x.dtype)


@checked(_in_torch, sample=some_channels)
def _forward(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor, silu: bool) -> Tensor:
    """y [B, T, D] in the dtype of x; weight [W, D] and bias [D] in fp32."""
    (batch, T, D), (rows, stride) = x.shape, strided_rows(x)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    constants = _constants(D, stride, len(weight))
    grid = _grid(T, batch, constants)
    launch(forward_kernel, grid, rows, state, weight, bias, y, T, **constants, SILU=silu, num_warps=WARPS)
    return y


_operator = torch.library.custom_op("rebased::short_conv", _forward, mutates_args=())


@_operator.register_fake
def _(x, state, weight, bias, silu):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _backward_in_torch(x, state, weight, bias, dy, silu):
    """As _backward."""
    return tuple(differentiate(partial(_in_torch, silu=silu), (x, state, weight, bias), dy))


@torch.library.custom_op("rebased::short_conv_backward", mutates_args=())
@checked(_backward_in_torch, sample=some_channels)
def _backward(
    x: Tensor, state: Tensor, weight: Tensor, bias: Tensor, dy: Tensor, silu: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (batch, T, D), W, (rows, stride) = x.shape, len(weight), strided_rows(x)
    dx, dstate = torch.empty_like(x, memory_format=torch.contiguous_format), torch.empty_like(state)
    constants = _constants(D, stride, W)
    grid = _grid(T + W - 1, batch, constants)
    sums = weight.new_empty(batch, grid[0], W + 1, D)
    outputs = dy, dx, dstate, sums, T
    if silu:
        options = {"RUN": RUN, "num_warps": RUN_WARPS}
        launch(silu_backward_kernel, grid, rows, state, weight, bias, *outputs, **constants, **options)
    else:
        launch(backward_kernel, grid, rows, state, weight, *outputs, **constants, num_warps=BACKWARD_WARPS)
    total = sums.sum((0, 1))
    return dx, dstate, total[:W].clone(), total[W].clone()


@_backward.register_fake
def _(x, state, weight, bias, dy, silu):
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    return dx, torch.empty_like(state), torch.empty_like(weight), torch.empty_like(bias)


def _setup(ctx, inputs, output):
    *tensors, ctx.silu = inputs
    ctx.save_for_backward(*tensors)


def _autograd(ctx, dy):
    return *_backward(*ctx.saved_tensors, dy.contiguous(), ctx.silu), None


_operator.register_autograd(_autograd, setup_context=_setup)


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, silu: bool) -> Tensor:
    """The y of short_conv_extend, computed in fp32: x [B, T, D], weight [D, W], bias [D], state [B, W-1, D].

    The tokens of x may be strided, as those of half a projection are.
    """
    taps = weight.float().t().contiguous()
    offset = taps.new_zeros(x.shape[2]) if bias is None else bias.float()
    inside = silu and len(taps) <= MOST_TAPS
    y = call_operator(_operator, _forward, x, state.to(x.dtype).contiguous(), taps, offset, inside)
    return functional.silu(y) if silu and not inside else y
