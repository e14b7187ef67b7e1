# mypy: allow-untyped-defs
"""The gradient of an embedding on a GPU, summed in two steps: over chunks of positions, then over a token's chunks.

Positions are sorted by token and cut into chunks of one token each. Only the device knows how many chunks a token has,
so the grid has the largest size that can occur: all full chunks, and one short chunk per token.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from rebased.ops.kernel_launch import launch

CHUNK = 256  # positions that a program sums
TILE = 2048  # numbers that it reads at once
MAX_WIDTH = 4096  # columns that a kernel takes


@triton.jit
def chunks_kernel(
    dy, order, starts, firsts, owners, sums, D, CHUNK: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """sums [chunks, D]: the sum of the rows dy[order[begin:end]], where begin and end bound a chunk of one token's
    positions; 0 for a chunk without positions. dy [M, D]."""
    chunk = tl.program_id(0)
    token = tl.load(owners + chunk)
    begin = tl.load(starts + token) + (chunk - tl.load(firsts + token)) * CHUNK
    end = tl.minimum(begin + CHUNK, tl.load(starts + token + 1))
    columns = tl.arange(0, WIDTH)[None, :]
    total = tl.zeros([ROWS, WIDTH], tl.float32)
    for at in range(begin, end, ROWS):
        positions = at + tl.arange(0, ROWS)
        rows = tl.load(order + positions, mask=positions < end, other=0).to(tl.int64)
        inside = (positions < end)[:, None] & (columns < D)
        total += tl.load(dy + rows[:, None] * D + columns, mask=inside, other=0.0).to(tl.float32)
    columns = tl.arange(0, WIDTH)
    tl.store(sums + chunk.to(tl.int64) * D + columns, tl.sum(total, 0), mask=columns < D)


@triton.jit
def tokens_kernel(sums, firsts, dweight, D, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """dweight [vocab, D]: the sum of the chunks of each token."""
    token = tl.program_id(0)
    begin, end = tl.load(firsts + token), tl.load(firsts + token + 1)
    columns = tl.arange(0, WIDTH)[None, :]
    total = tl.zeros([ROWS, WIDTH], tl.float32)
    for at in range(begin, end, ROWS):
        chunks = (at + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        total += tl.load(sums + chunks * D + columns, mask=(chunks < end) & (columns < D), other=0.0)
    columns = tl.arange(0, WIDTH)
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
    starts = torch.searchsorted(keys, numbers, out_int32=True)  # [vocab+1]: where the positions of each token begin
    chunks = (starts.diff() + CHUNK - 1).div(CHUNK, rounding_mode="floor")
    firsts = torch.cat([chunks.new_zeros(1), chunks.cumsum(0, dtype=torch.int32)])  # [vocab+1]: its first chunk
    most_chunks = len(keys) // CHUNK + min(vocab, len(keys))
    every = torch.arange(most_chunks, device=device, dtype=torch.int32)
    owners = torch.searchsorted(firsts, every, right=True) - 1
    owners = owners.clamp_(max=vocab - 1).to(torch.int32)  # chunks beyond the last one find no positions
    width = triton.next_power_of_2(D)
    sizes = {"ROWS": max(1, TILE // width), "WIDTH": width, "num_warps": 4}
    sums = dy.new_empty(most_chunks, D, dtype=torch.float32)
    launch(chunks_kernel, (most_chunks,), dy, order, starts, firsts, owners, sums, D, CHUNK=CHUNK, **sizes)
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
    """weight[tokens]: weight [vocab, D], tokens [...] -> [..., D]. Differentiable once in weight."""
    return _forward(weight, tokens)
