# mypy: allow-untyped-defs
"""The short convolution on a GPU: each tensor is read once and written once, forward and backward.

In plain torch every tap is one pass over memory, about 40 passes with the gradients. Here there are six.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rebased.ops.kernel_launch import launch

TOKENS, CHANNELS, WARPS = 32, 64, 4  # per program


@triton.jit
def _locate(T, TOKENS: tl.constexpr, CHANNELS: tl.constexpr):
    """The batch row, the tokens [TOKENS, 1] and the channels [1, CHANNELS] of this program."""
    row = tl.program_id(2).to(tl.int64)
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)[:, None]
    return row, tokens, tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]


@triton.jit
def _load_seen(x, state, p, D, channels, mask, W: tl.constexpr):
    """Input p of a sequence. The W - 1 inputs before the first token come from the state."""
    here = tl.load(x + p * D + channels, mask=mask & (p >= 0), other=0.0).to(tl.float32)
    before = tl.load(state + (p + W - 1) * D + channels, mask=mask & (p < 0), other=0.0).to(tl.float32)
    return tl.where(p < 0, before, here)


@triton.jit
def forward_kernel(
    x, state, weight, bias, y, T, D, W: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr
):  # fmt: skip
    """y_t = bias + sum_w weight[w] seen_{t-(W-1)+w}: x, y [B, T, D], state [B, W-1, D], weight [W, D], bias [D]."""
    row, tokens, channels = _locate(T, TOKENS, CHANNELS)
    mask = (tokens < T) & (channels < D)
    acc = tl.load(bias + channels, mask=channels < D, other=0.0) + tl.zeros([TOKENS, CHANNELS], tl.float32)
    for w in tl.static_range(W):
        tap = tl.load(weight + w * D + channels, mask=channels < D, other=0.0)
        acc += tap * _load_seen(x + row * T * D, state + row * (W - 1) * D, tokens - (W - 1) + w, D, channels, mask, W)
    tl.store(y + row * T * D + tokens * D + channels, acc.to(y.dtype.element_ty), mask=mask)


@triton.jit
def backward_kernel(
    x, state, weight, dy, dx, dstate, sums, T, D, W: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr
):  # fmt: skip
    """dx, dstate, and sums [B, tiles, W+1, D]: the share of each tile in dweight and, last, in dbias.

    The tokens of a program are inputs here, including those of the state: input p meets tap w in output p + W - 1 - w.
    """
    row, tokens, channels = _locate(T, TOKENS, CHANNELS)
    p = tokens - (W - 1)
    mask = (p < T) & (channels < D)
    seen = _load_seen(x + row * T * D, state + row * (W - 1) * D, p, D, channels, mask, W)
    dseen = tl.zeros([TOKENS, CHANNELS], tl.float32)
    sums += (row * tl.num_programs(0) + tl.program_id(0)) * (W + 1) * D
    for w in tl.static_range(W):
        t = p + (W - 1) - w
        out = tl.load(dy + row * T * D + t * D + channels, mask=(t >= 0) & (t < T) & (channels < D), other=0.0)
        out = out.to(tl.float32)
        dseen += tl.load(weight + w * D + channels, mask=channels < D, other=0.0) * out
        tl.store(sums + w * D + channels, tl.sum(seen * out, 0)[None, :], mask=channels < D)
        if w == W - 1:  # here t = p, so every output is added once
            tl.store(sums + W * D + channels, tl.sum(out, 0)[None, :], mask=channels < D)
    tl.store(dx + row * T * D + p * D + channels, dseen.to(dx.dtype.element_ty), mask=mask & (p >= 0))
    at = dstate + row * (W - 1) * D + tokens * D + channels
    tl.store(at, dseen.to(dstate.dtype.element_ty), mask=mask & (p < 0))


def _grid(inputs: int, D: int, batch: int) -> tuple[int, int, int]:
    return triton.cdiv(inputs, TOKENS), triton.cdiv(D, CHANNELS), batch


@torch.library.custom_op("rebased::short_conv", mutates_args=())
def _forward(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """y [B, T, D] in the dtype of x; weight [W, D] and bias [D] in fp32."""
    batch, T, D = x.shape
    y = torch.empty_like(x)
    options = {"W": len(weight), "TOKENS": TOKENS, "CHANNELS": CHANNELS, "num_warps": WARPS}
    launch(forward_kernel, _grid(T, D, batch), x, state, weight, bias, y, T, D, **options)
    return y


@_forward.register_fake
def _(x, state, weight, bias):
    return torch.empty_like(x)


@torch.library.custom_op("rebased::short_conv_backward", mutates_args=())
def _backward(x: Tensor, state: Tensor, weight: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (batch, T, D), W = x.shape, len(weight)
    dx, dstate = torch.empty_like(x), torch.empty_like(state)
    grid = _grid(T + W - 1, D, batch)
    sums = weight.new_empty(batch, grid[0], W + 1, D)
    options = {"W": W, "TOKENS": TOKENS, "CHANNELS": CHANNELS, "num_warps": WARPS}
    launch(backward_kernel, grid, x, state, weight, dy, dx, dstate, sums, T, D, **options)
    total = sums.sum((0, 1))
    return dx, dstate, total[:W].clone(), total[W].clone()


@_backward.register_fake
def _(x, state, weight, dy):
    return torch.empty_like(x), torch.empty_like(state), torch.empty_like(weight), torch.empty_like(weight[0])


def _setup(ctx, inputs, output):
    x, state, weight, _ = inputs
    ctx.save_for_backward(x, state, weight)


def _autograd(ctx, dy):
    return _backward(*ctx.saved_tensors, dy.contiguous())


_forward.register_autograd(_autograd, setup_context=_setup)


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor) -> Tensor:
    """The y of short_conv_extend, computed in fp32: x [B, T, D], weight [D, W], bias [D], state [B, W-1, D]."""
    taps = weight.float().t().contiguous()
    offset = taps.new_zeros(x.shape[2]) if bias is None else bias.float()
    return _forward(x.contiguous(), state.to(x.dtype).contiguous(), taps, offset)
