# mypy: allow-untyped-defs
"""Softmax cross-entropy of a block of logits on a GPU: one program a row, the gradient written over the logits.

A row that fits is read once and stays in registers; a longer one is read twice, the second time from the cache.
"""

import triton
import triton.language as tl
from torch import Tensor

from rebased.ops.cross_entropy import IGNORED
from rebased.ops.kernel_launch import launch

MAX_BLOCK = 16384  # logits that a program holds at once: 32 a thread of 16 warps
PIECE = 4096  # of a longer row, 16 a thread
IGNORED_ = tl.constexpr(IGNORED)
LEAST = tl.constexpr(-3e38)  # a number: the difference of two of it is not NaN


@triton.jit
def _store_gradient(logits, x, columns, norm, target, counts, scale, vocab):
    gradient = tl.exp(x - norm) - tl.where(columns == target, 1.0, 0.0)
    gradient = tl.where(counts, scale * gradient, 0.0)
    tl.store(logits + columns, gradient.to(logits.dtype.element_ty), mask=columns < vocab)


@triton.jit
def cross_entropy_kernel(
    logits, targets, losses, scale, vocab,
    BLOCK: tl.constexpr, ONE_BLOCK: tl.constexpr, GRADIENT: tl.constexpr,
):  # fmt: skip
    """losses [rows] of logits [rows,vocab], which become scale * (softmax - onehot), or 0 in ignored rows."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocab
    target = tl.load(targets + row)
    counts = target != IGNORED_
    inside = (target >= 0) & (target < vocab)
    at_target = tl.load(logits + target, mask=inside, other=0.0).to(tl.float32)  # before it is overwritten
    columns = tl.arange(0, BLOCK)
    if ONE_BLOCK:
        x = tl.load(logits + columns, mask=columns < vocab, other=-float("inf")).to(tl.float32)
        top = tl.max(x, 0)
        norm = top + tl.log(tl.sum(tl.exp(x - top), 0))
        if GRADIENT:
            _store_gradient(logits, x, columns, norm, target, counts, scale, vocab)
    else:
        tops = tl.full([BLOCK], LEAST, tl.float32)  # of every BLOCK-th logit: one sum over the threads, at the end
        totals = tl.zeros([BLOCK], tl.float32)
        for start in range(0, vocab, BLOCK):
            x = tl.load(logits + start + columns, mask=start + columns < vocab, other=-float("inf")).to(tl.float32)
            new = tl.maximum(tops, x)
            totals = totals * tl.exp(tops - new) + tl.exp(x - new)
            tops = new
        top = tl.max(tops, 0)
        norm = top + tl.log(tl.sum(totals * tl.exp(tops - top), 0))
        if GRADIENT:
            for start in range(0, vocab, BLOCK):
                x = tl.load(logits + start + columns, mask=start + columns < vocab, other=-float("inf")).to(tl.float32)
                _store_gradient(logits, x, start + columns, norm, target, counts, scale, vocab)
    loss = tl.where(inside, norm - at_target, float("nan"))  # nobody waits to raise an error
    tl.store(losses + row, tl.where(counts, loss, 0.0))


def losses_and_gradient_(logits: Tensor, targets: Tensor, losses: Tensor, scale: float | None) -> None:
    """Write the loss of each row [rows]; in place, logits [rows,vocab] become scale * (softmax - onehot), if any."""
    rows, vocab = logits.shape
    one_block = vocab <= MAX_BLOCK
    block = triton.next_power_of_2(vocab) if one_block else PIECE
    launch(
        cross_entropy_kernel, (rows,),
        logits, targets.contiguous(), losses, scale or 1.0, vocab,
        BLOCK=block, ONE_BLOCK=one_block, GRADIENT=scale is not None,
        num_warps=max(1, min(16, block // (1024 if one_block else 512))),
    )  # fmt: skip
