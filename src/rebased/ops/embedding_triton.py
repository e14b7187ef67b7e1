# mypy: allow-untyped-defs
"""The gradient of an embedding on a GPU: places sorted by token, cut into pieces, summed piece by piece, then together.

How many pieces a token has is known on the device alone, so the grid is as large as it can ever be: a token's last
piece may be short, and that is at most one a token.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from rebased.ops.kernel_launch import launch

PIECE = 256  # places that a program adds up
TILE = 2048  # numbers that it reads at once
MAX_WIDTH = 4096


@triton.jit
def pieces_kernel(
    dy, order, starts, firsts, owners, sums, D, PIECE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """sums [pieces,D]: of the rows of dy [M,D] at order[begin:end], a piece of its owner's places; 0 if it has none."""
    piece = tl.program_id(0)
    token = tl.load(owners + piece)
    begin = tl.load(starts + token) + (piece - tl.load(firsts + token)) * PIECE
    end = tl.minimum(begin + PIECE, tl.load(starts + token + 1))
    columns = tl.arange(0, BLOCK)[None, :]
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for at in range(begin, end, ROWS):
        places = at + tl.arange(0, ROWS)
        rows = tl.load(order + places, mask=places < end, other=0).to(tl.int64)
        inside = (places < end)[:, None] & (columns < D)
        total += tl.load(dy + rows[:, None] * D + columns, mask=inside, other=0.0).to(tl.float32)
    columns = tl.arange(0, BLOCK)
    tl.store(sums + piece.to(tl.int64) * D + columns, tl.sum(total, 0), mask=columns < D)


@triton.jit
def tokens_kernel(sums, firsts, dweight, D, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """dweight [vocab,D]: the sum of a token's pieces."""
    token = tl.program_id(0)
    begin, end = tl.load(firsts + token), tl.load(firsts + token + 1)
    columns = tl.arange(0, BLOCK)[None, :]
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for at in range(begin, end, ROWS):
        pieces = (at + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        total += tl.load(sums + pieces * D + columns, mask=(pieces < end) & (columns < D), other=0.0)
    columns = tl.arange(0, BLOCK)
    at = token.to(tl.int64) * D + columns
    tl.store(dweight + at, tl.sum(total, 0).to(dweight.dtype.element_ty), mask=columns < D)


@torch.library.custom_op("rebased::embed", mutates_args=())
def _forward(weight: Tensor, tokens: Tensor) -> Tensor:
    return functional.embedding(tokens, weight)


@_forward.register_fake
def _(weight, tokens):
    return weight.new_empty(*tokens.shape, weight.shape[1])


@torch.library.custom_op("rebased::embed_backward", mutates_args=())
def _backward(dy: Tensor, tokens: Tensor, vocab: int, dtype: torch.dtype) -> Tensor:
    D, device = dy.shape[-1], dy.device
    keys, order = tokens.flatten().to(torch.int32).sort(stable=True)
    numbers = torch.arange(vocab + 1, device=device, dtype=torch.int32)
    starts = torch.searchsorted(keys, numbers, out_int32=True)  # [vocab+1] where each token's places begin
    pieces = (starts.diff() + PIECE - 1).div(PIECE, rounding_mode="floor")
    firsts = torch.cat([pieces.new_zeros(1), pieces.cumsum(0, dtype=torch.int32)])  # [vocab+1] and its pieces
    most = len(keys) // PIECE + min(vocab, len(keys))
    every = torch.arange(most, device=device, dtype=torch.int32)
    owners = torch.searchsorted(firsts, every, right=True) - 1
    owners = owners.clamp_(max=vocab - 1).to(torch.int32)  # those beyond the last piece find no places
    block = triton.next_power_of_2(D)
    sizes = {"ROWS": max(1, TILE // block), "BLOCK": block, "num_warps": 4}
    sums = dy.new_empty(most, D, dtype=torch.float32)
    launch(pieces_kernel, (most,), dy, order, starts, firsts, owners, sums, D, PIECE=PIECE, **sizes)
    dweight = dy.new_empty(vocab, D, dtype=dtype)
    launch(tokens_kernel, (vocab,), sums, firsts, dweight, D, **sizes)
    return dweight


@_backward.register_fake
def _(dy, tokens, vocab, dtype):
    return dy.new_empty(vocab, dy.shape[-1], dtype=dtype)


def _setup(ctx, inputs, output):
    weight, tokens = inputs
    ctx.vocab, ctx.dtype = len(weight), weight.dtype
    ctx.save_for_backward(tokens)


def _autograd(ctx, dy):
    (tokens,) = ctx.saved_tensors
    return _backward(dy.contiguous(), tokens, ctx.vocab, ctx.dtype), None


_forward.register_autograd(_autograd, setup_context=_setup)


def gather(weight: Tensor, tokens: Tensor) -> Tensor:
    return _forward(weight, tokens)
