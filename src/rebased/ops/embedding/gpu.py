# mypy: allow-untyped-defs
"""An embedding on a GPU: one kernel reads the rows and adds those of positions; the gradient takes two steps.

The gradient of a token is summed over chunks of its positions, then over the chunks. For that, positions are sorted by
token and cut into chunks of one token each. Only the device knows how many chunks a token has, so the grid has the
largest size that can occur: all full chunks, and one short chunk per token.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from rebased.ops.comparison import pick, some
from rebased.ops.kernel_launch import launch
from rebased.ops.self_check import checked

CHUNK = 256  # positions that a program sums
TILE = 2048  # numbers that it reads at once
MAX_WIDTH = 4096  # columns that a kernel takes


@triton.jit
def gather_kernel(weight, tokens, positions, y, M, T, vocab, D: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """y [M, D] = weight[tokens], for ROWS of the M tokens; plus positions[row % T], unless positions is None."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    numbers = tl.load(tokens + rows, mask=rows < M, other=0).to(tl.int64)
    known = (numbers >= 0) & (numbers < vocab)
    tl.device_assert(known, "a token is below 0, or not below the size of the vocabulary")
    columns = tl.arange(0, WIDTH)[None, :]
    inside = (rows < M)[:, None] & (columns < D)
    found = tl.load(weight + numbers[:, None] * D + columns, mask=inside & known[:, None], other=0.0)
    if positions is not None:
        places = tl.load(positions + (rows % T)[:, None] * D + columns, mask=inside, other=0.0)
        found = (found.to(tl.float32) + places.to(tl.float32)).to(y.dtype.element_ty)
    tl.store(y + rows.to(tl.int64)[:, None] * D + columns, found, mask=inside)


@triton.jit
def chunks_kernel(
    dy, order, starts, firsts, owners, sums,
    D: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
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
def totals_kernel(sums, firsts, dweight, D: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
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


def _sizes(D: int) -> dict[str, int]:
    """D is a constant so that rows of 24 or 48 numbers, too, are read four numbers at once."""
    width = triton.next_power_of_2(D)
    return {"D": D, "ROWS": max(1, TILE // width), "WIDTH": width, "num_warps": 4}


def _in_torch(weight, tokens, positions):
    """As gather."""
    rows = functional.embedding(tokens, weight)
    return rows if positions is None else rows + positions


def _some_rows(args, results):
    weight, tokens, positions = args
    numbers = torch.tensor(some(tokens.numel(), 256, every=64), device=tokens.device)
    places = None if positions is None else positions[numbers % len(positions)]
    flat = results[0].reshape(-1, weight.shape[1])
    chosen, tokens = tokens.flatten()[numbers].unique(return_inverse=True)
    return (weight[chosen], tokens, places), flat[numbers]


@torch.library.custom_op("rebased::embed", mutates_args=())
@checked(_in_torch, sample=_some_rows)
def gather(weight: Tensor, tokens: Tensor, positions: Tensor | None) -> Tensor:
    """weight[tokens] + positions: weight [vocab, D], tokens [..., T], positions [T, D] or None -> [..., T, D].

    Differentiable once. A token that is not in the vocabulary stops the device, as in torch."""
    D, M, T = weight.shape[1], tokens.numel(), 1 if positions is None else len(positions)
    y = weight.new_empty(*tokens.shape, D)
    sizes = _sizes(D)
    rows = None if positions is None else positions.contiguous()
    launch(
        gather_kernel, (triton.cdiv(M, sizes["ROWS"]),),
        weight.contiguous(), tokens.contiguous(), rows, y, M, T, len(weight), debug=True, **sizes,
    )  # fmt: skip
    return y


@gather.register_fake
def _(weight, tokens, positions):
    return weight.new_empty(*tokens.shape, weight.shape[1])


def _backward_in_torch(dy, tokens, vocab, dtype):
    """As _backward."""
    wide = torch.promote_types(dy.dtype, torch.float32)
    total = dy.new_zeros(vocab, dy.shape[-1], dtype=wide)
    return total.index_add_(0, tokens.flatten(), dy.reshape(-1, dy.shape[-1]).to(wide)).to(dtype)


def _some_columns(args, results):
    dy, tokens, vocab, dtype = args
    numbers = some(dy.shape[-1], 16)
    return (pick(dy, dy.ndim - 1, numbers), tokens, vocab, dtype), pick(results[0], 1, numbers)


@torch.library.custom_op("rebased::embed_backward", mutates_args=())
@checked(_backward_in_torch, sample=_some_columns)
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
    sizes = _sizes(D)
    sums = dy.new_empty(most_chunks, D, dtype=torch.float32)
    launch(chunks_kernel, (most_chunks,), dy, order, starts, firsts, owners, sums, CHUNK=CHUNK, **sizes)
    dweight = dy.new_empty(vocab, D, dtype=dtype)
    launch(totals_kernel, (vocab,), sums, firsts, dweight, **sizes)
    return dweight


@_backward.register_fake
def _(dy, tokens, vocab, dtype):
    return dy.new_empty(vocab, dy.shape[-1], dtype=dtype)


def _setup(ctx, inputs, output):
    weight, tokens, _ = inputs
    ctx.vocab, ctx.dtype = len(weight), weight.dtype
    ctx.save_for_backward(tokens)


def _autograd(ctx, dy):
    (tokens,) = ctx.saved_tensors
    of_weight, _, of_positions = ctx.needs_input_grad
    dweight = _backward(dy.contiguous(), tokens, ctx.vocab, ctx.dtype) if of_weight else None
    return dweight, None, dy.sum_to_size(dy.shape[-2:]) if of_positions else None


gather.register_autograd(_autograd, setup_context=_setup)
