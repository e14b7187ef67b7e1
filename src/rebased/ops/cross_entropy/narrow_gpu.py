# mypy: allow-untyped-defs
"""The loss of a narrow head on a GPU: logits exist in registers only, and are computed twice.

Softmax over the vocabulary followed by a product with the weights is attention: a row asks, the tokens are keys and
values. So one kernel walks over the vocabulary as attention does over keys, and has the loss of its rows and the
gradient of hidden at the end. A second one walks over the rows for the gradient of weight. Where D is small that is
less work than to write and read the logits, of which there are far more than of anything else.
"""

import math
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from rebased.ops.comparison import ROUNDOFF, compare_calls, some
from rebased.ops.cross_entropy.reference import IGNORE
from rebased.ops.kernel_launch import launch
from rebased.ops.self_check import checked

MAX_WIDTH = 128
"""The largest D. A wider head computes more in a tile than it would read and write."""

ROWS, TOKENS = 64, 128  # of a tile of logits
SPLITS_FOR = 256  # programs that the gradient of weight is spread over: two for each multiprocessor
IGNORE_ = tl.constexpr(IGNORE)
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LEAST = tl.constexpr(-3e38)  # finite, so that the difference of two is not NaN


@triton.jit
def rows_kernel(
    hidden, weight, targets, losses, norms, d_hidden, rows, vocab,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    SHIFT: tl.constexpr, EVEN: tl.constexpr, GRADIENT: tl.constexpr,
):  # fmt: skip
    """losses and norms [rows], the latter log2 of the sum of exponentials; with GRADIENT also d_hidden [rows, D].

    Exponentials are 2^SHIFT times as large, so that those of rare tokens keep their digits in half precision.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK_D)
    token = tl.arange(0, TOKENS)
    in_row, in_d = row < rows, d < D
    x = tl.load(hidden + row[:, None] * D + d, mask=in_row[:, None] & in_d, other=0.0)
    target = tl.load(targets + row, mask=in_row, other=IGNORE_)
    counts, valid = target != IGNORE_, (target >= 0) & (target < vocab)
    w_target = tl.load(weight + target[:, None] * D + d, mask=valid[:, None] & in_d, other=0.0).to(tl.float32)
    at_target = tl.where(valid, tl.sum(x.to(tl.float32) * w_target, 1) * LOG2E, -float("inf"))
    # Totals are over the other tokens: their sum would lose its digits beside a target of probability 1.
    top = tl.full([ROWS], LEAST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mean = tl.zeros([ROWS, BLOCK_D], tl.float32)  # of their weights, times total
    for start in range(0, vocab, TOKENS):
        tokens = start + token
        if EVEN:
            w = tl.load(weight + tokens[:, None] * D + d, mask=in_d[None, :], other=0.0)
            logits = tl.dot(x, tl.trans(w)) * LOG2E
        else:
            w = tl.load(weight + tokens[:, None] * D + d, mask=(tokens < vocab)[:, None] & in_d, other=0.0)
            logits = tl.where(tokens < vocab, tl.dot(x, tl.trans(w)) * LOG2E, -float("inf"))
        new = tl.maximum(top, tl.max(logits, 1))
        p = tl.exp2(logits - (new - SHIFT)[:, None])
        p = tl.where(tokens[None, :] == target[:, None], 0.0, p)
        decay = tl.exp2(top - new)
        total = total * decay + tl.sum(p, 1)
        if GRADIENT:
            mean = tl.dot(p.to(w.dtype), w, mean * decay[:, None])
        top = new
    everything = total + tl.exp2(at_target - (top - SHIFT))
    norm = top - SHIFT + tl.log2(everything)
    loss = tl.where(valid, (norm - at_target) * LN2, float("nan"))  # raising an error would wait for the device
    tl.store(losses + row, tl.where(counts, loss, 0.0), mask=in_row)
    tl.store(norms + row, tl.where(counts, norm, -LEAST), mask=in_row)  # 2^(x - 3e38): nothing
    if GRADIENT:
        gradient = (mean - total[:, None] * w_target) / everything[:, None]
        gradient = tl.where(counts[:, None], gradient, 0.0).to(d_hidden.dtype.element_ty)
        tl.store(d_hidden + row[:, None] * D + d, gradient, mask=in_row[:, None] & in_d)


@triton.jit
def tokens_kernel(
    hidden, weight, targets, norms, d_weight, rows, vocab, rows_per_split,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """The share of one part of the rows in the gradient of weight: d_weight [splits, vocab, D]."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    split = tl.program_id(1)
    d = tl.arange(0, BLOCK_D)
    in_d, in_vocab = d < D, token < vocab
    w = tl.load(weight + token[:, None] * D + d, mask=in_vocab[:, None] & in_d, other=0.0)
    total = tl.zeros([TOKENS, BLOCK_D], tl.float32)
    first = split * rows_per_split
    for start in range(first, tl.minimum(rows, first + rows_per_split), ROWS):
        row = start + tl.arange(0, ROWS)
        in_row = row < rows
        x = tl.load(hidden + row[:, None].to(tl.int64) * D + d, mask=in_row[:, None] & in_d, other=0.0)
        norm = tl.load(norms + row, mask=in_row, other=float("inf")) - SHIFT
        target = tl.load(targets + row, mask=in_row, other=IGNORE_)
        p = tl.exp2(tl.dot(w, tl.trans(x)) * LOG2E - norm[None, :])
        p = tl.where(token[:, None] == target[None, :], p - (1 << SHIFT), p)
        total = tl.dot(p.to(x.dtype), x, total)
    place = d_weight + (split.to(tl.int64) * vocab + token)[:, None] * D + d
    tl.store(place, total / (1 << SHIFT), mask=in_vocab[:, None] & in_d)


def _shape(x: Tensor) -> dict[str, int]:
    """The constants of both kernels."""
    D = x.shape[1]
    return {
        "D": D,
        "BLOCK_D": max(16, triton.next_power_of_2(D)),
        "ROWS": ROWS,
        "TOKENS": TOKENS,
        "SHIFT": 14 if x.dtype == torch.float16 else 0,
        "num_warps": 4,
        "num_stages": 3,
    }


def _roundoff(x, *_):
    return ROUNDOFF[x.dtype]


def _rows_in_torch(x, head, targets, dtype, gradient):
    """As _rows."""
    wide = torch.promote_types(x.dtype, torch.float32)
    logits = x.to(wide) @ head.to(wide).T
    counts, valid = targets != IGNORE, (targets >= 0) & (targets < len(head))
    at = torch.where(valid, targets, 0).unsqueeze(1)
    norms = logits.logsumexp(1)
    losses = torch.where(valid, norms - logits.gather(1, at).squeeze(1), float("nan"))
    p = logits.softmax(1).scatter_add(1, at, -torch.ones_like(at, dtype=wide))
    d_hidden = torch.where(counts[:, None], p @ head.to(wide), 0).to(dtype) if gradient else x.new_empty(0, dtype=dtype)
    return torch.where(counts, losses, 0), torch.where(counts, norms / math.log(2), 3e38), d_hidden


def _compare_rows(args, result):
    """Errors of some rows that count."""
    x, head, targets, _, gradient = args
    losses, norms, d_hidden = result
    counting = ((targets >= 0) & (targets < len(head))).nonzero().flatten()
    chosen = counting[some(len(counting), max(4, min(128, 2**22 // len(head))), every=ROWS)]
    parts = [losses[chosen], norms[chosen], *([d_hidden[chosen]] if gradient else [])]

    def law(x, head, targets):
        return _rows_in_torch(x, head, targets, x.dtype, gradient)[: len(parts)]

    size = 1 + norms[chosen].abs().double()  # a logarithm of what is near 1 has an absolute error
    return compare_calls(law, [((x[chosen], head, targets[chosen]), parts)], parts, _roundoff(x), (size, size))


@checked(_rows_in_torch, compare=_compare_rows)
def _rows(
    x: Tensor, head: Tensor, targets: Tensor, dtype: torch.dtype, gradient: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """losses [rows], norms [rows], and the gradient of hidden in `dtype` (empty unless wanted)."""
    rows, vocab = len(x), len(head)
    losses, norms = x.new_empty(2, rows, dtype=torch.float32)
    d_hidden = x.new_empty(x.shape if gradient else 0, dtype=dtype)
    launch(
        rows_kernel, (triton.cdiv(rows, ROWS),),
        x, head, targets, losses, norms, d_hidden, rows, vocab,
        EVEN=vocab % TOKENS == 0, GRADIENT=gradient, **_shape(x),
    )  # fmt: skip
    return losses, norms, d_hidden


def _some_tokens_in_torch(x, head, targets, norms, tokens):
    """The gradient of weight at some tokens."""
    wide = torch.promote_types(x.dtype, torch.float32)
    p = torch.exp2(x.to(wide) @ head[tokens].to(wide).T / math.log(2) - norms.to(wide)[:, None])
    return (p - (targets[:, None] == tokens).to(wide)).T @ x.to(wide)


def _tokens_in_torch(x, head, targets, norms):
    """As _tokens."""
    every = torch.arange(len(head), device=x.device)
    return torch.cat([_some_tokens_in_torch(x, head, targets, norms, part) for part in every.split(1024)])


def _compare_tokens(args, d_weight):
    """Errors at some tokens."""
    x, head, targets, norms = args
    chosen = torch.tensor(some(len(head), max(4, min(64, 2**24 // len(x))), every=ROWS), device=x.device)
    parts = [d_weight[chosen]]
    law = partial(_some_tokens_in_torch, tokens=torch.arange(len(chosen), device=x.device))
    renamed = torch.full_like(targets, IGNORE)
    for number, token in enumerate(chosen.tolist()):
        renamed[targets == token] = number
    return compare_calls(law, [((x, head[chosen], renamed, norms), parts)], parts, _roundoff(x))


@checked(_tokens_in_torch, compare=_compare_tokens)
def _tokens(x: Tensor, head: Tensor, targets: Tensor, norms: Tensor) -> Tensor:
    """The gradient of weight [vocab, D] in fp32."""
    rows, (vocab, D) = len(x), head.shape
    blocks = triton.cdiv(vocab, TOKENS)
    splits = min(triton.cdiv(SPLITS_FOR, blocks), triton.cdiv(rows, ROWS))
    per_split = triton.cdiv(triton.cdiv(rows, splits), ROWS) * ROWS
    shares = norms.new_empty(splits, vocab, D)
    launch(tokens_kernel, (blocks, splits), x, head, targets, norms, shares, rows, vocab, per_split, **_shape(x))
    return shares[0] if splits == 1 else shares.sum(0)


def loss_and_gradients(
    hidden: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype, for_hidden: bool, for_weight: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss [] and its gradients, as api._forward does. dtype, of products: fp16 or bf16. D <= MAX_WIDTH."""
    x, head, targets = hidden.to(dtype).contiguous(), weight.to(dtype).contiguous(), targets.contiguous()
    losses, norms, d_hidden = _rows(x, head, targets, hidden.dtype, for_hidden)
    return losses.sum(), d_hidden, _tokens(x, head, targets, norms) if for_weight else losses.new_empty(0)
