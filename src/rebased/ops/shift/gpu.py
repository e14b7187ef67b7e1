# mypy: allow-untyped-defs
"""The token shift on a GPU: each tensor is read once and written once, forward and backward.

In plain torch three mixtures are 61 passes over memory with the gradients. Here there are nine. A program reads the
neighbours of its tokens too. All but one of them are its own tokens, which the cache holds.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rebased.ops.comparison import differentiate, some_channels
from rebased.ops.kernel_launch import launch
from rebased.ops.self_check import checked

TOKENS, CHANNELS, WARPS = 32, 64, 4  # per program
MOST = 3  # mixtures per kernel: each is a tensor of its own, and so an argument


@triton.jit
def _locate(TOKENS: tl.constexpr, CHANNELS: tl.constexpr):
    """The batch row, the tokens [TOKENS, 1] and the channels [1, CHANNELS] of this program."""
    row = tl.program_id(2).to(tl.int64)
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)[:, None]
    return row, tokens, tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]


@triton.jit
def _load_pair(x, last, t, D, channels, mask):
    """Token t of a sequence and the one before it, in fp32. The one before the first is `last`."""
    here = tl.load(x + t * D + channels, mask=mask, other=0.0).to(tl.float32)
    before = tl.load(x + (t - 1) * D + channels, mask=mask & (t > 0), other=0.0).to(tl.float32)
    first = tl.load(last + channels + 0 * t, mask=mask & (t == 0), other=0.0).to(tl.float32)
    return here, tl.where(t == 0, first, before)


@triton.jit
def forward_kernel(
    x, last, mixes, y0, y1, y2, T, D, M: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr
):  # fmt: skip
    """The M mixtures y0, y1, y2 [B, T, D] (None beyond M): x [B, T, D], last [B, D], mixes [M, D]."""
    row, t, channels = _locate(TOKENS, CHANNELS)
    mask = (t < T) & (channels < D)
    here, before = _load_pair(x + row * T * D, last + row * D, t, D, channels, mask)
    ys = (y0, y1, y2)
    for i in tl.static_range(M):
        share = tl.load(mixes + i * D + channels, mask=channels < D, other=0.0)
        # As torch.lerp: a share of 0 gives the token before and a share of 1 the token itself, without rounding.
        step = here - before
        y = tl.where(share < 0.5, before + share * step, here - (1 - share) * step)
        tl.store(ys[i] + row * T * D + t * D + channels, y.to(ys[i].dtype.element_ty), mask=mask)


@triton.jit
def backward_kernel(
    x, last, mixes, dy0, dy1, dy2, dx, dlast, sums, T, D, M: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr
):  # fmt: skip
    """dx, dlast, and sums [B, tiles, M, D]: the share of each tile in the gradient of mixes.

    A token is in the mixtures at its own place and in those after it. The gradients beyond the last token are zero.
    """
    row, t, channels = _locate(TOKENS, CHANNELS)
    mask = (t < T) & (channels < D)
    here, before = _load_pair(x + row * T * D, last + row * D, t, D, channels, mask)
    dhere = tl.zeros([TOKENS, CHANNELS], tl.float32)  # at token t
    dbefore = tl.zeros([TOKENS, CHANNELS], tl.float32)  # at the token before, from the mixtures of token t
    sums += (row * tl.num_programs(0) + tl.program_id(0)) * M * D
    dys, products = (dy0, dy1, dy2), ()
    for i in tl.static_range(M):
        share = tl.load(mixes + i * D + channels, mask=channels < D, other=0.0)
        at = dys[i] + row * T * D + t * D + channels
        own = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        after = tl.load(at + D, mask=mask & (t + 1 < T), other=0.0).to(tl.float32)
        dhere += share * own + (1 - share) * after
        dbefore += (1 - share) * own
        products += (own * (here - before),)  # type: ignore[assignment]
    for i in tl.static_range(M):  # only now, so that no load waits for a sum
        tl.store(sums + i * D + channels, tl.sum(products[i], 0)[None, :], mask=channels < D)
    tl.store(dx + row * T * D + t * D + channels, dhere.to(dx.dtype.element_ty), mask=mask)
    tl.store(dlast + row * D + channels + 0 * t, dbefore.to(dlast.dtype.element_ty), mask=mask & (t == 0))


def _launch(kernel, x: Tensor, tensors: list[Tensor | None], M: int) -> None:
    batch, T, D = x.shape
    grid = (triton.cdiv(T, TOKENS), triton.cdiv(D, CHANNELS), batch)
    options = {"M": M, "TOKENS": TOKENS, "CHANNELS": CHANNELS, "num_warps": WARPS}
    launch(kernel, grid, x, *tensors, T, D, **options)


def _arguments(tensors: list[Tensor]) -> list[Tensor | None]:
    return [*tensors, *[None] * (MOST - len(tensors))]


def _in_torch(x, last, mixes):
    """As _forward."""
    before = torch.cat([last.unsqueeze(1), x[:, :-1]], dim=1).to(mixes.dtype)
    return [torch.lerp(before, x.to(mixes.dtype), each).to(x.dtype) for each in mixes]


@torch.library.custom_op("rebased::token_shift", mutates_args=())
@checked(_in_torch, sample=some_channels)
def _forward(x: Tensor, last: Tensor, mixes: Tensor) -> list[Tensor]:
    """At most MOST mixtures [B, T, D] in the dtype of x; mixes [M, D] in fp32."""
    ys = [torch.empty_like(x) for _ in mixes]
    _launch(forward_kernel, x, [last, mixes, *_arguments(ys)], len(ys))
    return ys


@_forward.register_fake
def _(x, last, mixes):
    return [torch.empty_like(x) for _ in range(mixes.shape[0])]


def _backward_in_torch(x, last, mixes, dys):
    """As _backward."""
    return tuple(differentiate(_in_torch, (x, last, mixes), *dys))


@torch.library.custom_op("rebased::token_shift_backward", mutates_args=())
@checked(_backward_in_torch, sample=some_channels)
def _backward(x: Tensor, last: Tensor, mixes: Tensor, dys: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, last and mixes."""
    batch, T, _ = x.shape
    dx, dlast = torch.empty_like(x), torch.empty_like(last)
    sums = mixes.new_empty(batch, triton.cdiv(T, TOKENS), *mixes.shape)
    _launch(backward_kernel, x, [last, mixes, *_arguments(dys), dx, dlast, sums], len(dys))
    return dx, dlast, sums.sum((0, 1))


@_backward.register_fake
def _(x, last, mixes, dys):
    return torch.empty_like(x), torch.empty_like(last), torch.empty_like(mixes)


def _setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _autograd(ctx, dys):
    return _backward(*ctx.saved_tensors, [each.contiguous() for each in dys])


_forward.register_autograd(_autograd, setup_context=_setup)


def mix(x: Tensor, last: Tensor, mixes: Tensor) -> tuple[Tensor, ...]:
    """The mixtures of token_shift, computed in fp32: x [B, T, D], last [B, D], mixes [M, D]."""
    x, last, mixes = x.contiguous(), last.to(x.dtype).contiguous(), mixes.float().contiguous()
    return tuple(y for part in mixes.split(MOST) for y in _forward(x, last, part))
