# mypy: allow-untyped-defs
"""Softmax cross-entropy of a block of logits on a GPU: one program a row, the gradient written over the logits.

A row that fits is read once and stays in registers; a longer one is read twice.
"""

import triton
import triton.language as tl
from torch import Tensor

from rebased.ops.cross_entropy import IGNORED

MAX_BLOCK = 16384  # logits that a program holds at once: 32 a thread of 16 warps
IGNORED_ = tl.constexpr(IGNORED)


@triton.jit
def _load(logits, start, vocab, target, BLOCK: tl.constexpr):
    """A block of logits, and the target's if it is among them (else 0)."""
    columns = start + tl.arange(0, BLOCK)
    x = tl.load(logits + columns, mask=columns < vocab, other=-float("inf")).to(tl.float32)
    return columns, x, tl.sum(tl.where(columns == target, x, 0.0), 0)


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
    if ONE_BLOCK:
        columns, x, at_target = _load(logits, 0, vocab, target, BLOCK)
        top = tl.max(x, 0)
        norm = top + tl.log(tl.sum(tl.exp(x - top), 0))
        if GRADIENT:
            _store_gradient(logits, x, columns, norm, target, counts, scale, vocab)
    else:
        top = tl.full([], -float("inf"), tl.float32)
        total = tl.full([], 0.0, tl.float32)
        at_target = tl.full([], 0.0, tl.float32)
        for start in range(0, vocab, BLOCK):
            columns, x, here = _load(logits, start, vocab, target, BLOCK)
            new = tl.maximum(top, tl.max(x, 0))
            total = total * tl.exp(top - new) + tl.sum(tl.exp(x - new), 0)
            top = new
            at_target += here
        norm = top + tl.log(total)
        if GRADIENT:
            for start in range(0, vocab, BLOCK):
                columns, x, here = _load(logits, start, vocab, target, BLOCK)
                _store_gradient(logits, x, columns, norm, target, counts, scale, vocab)
    inside = (target >= 0) & (target < vocab)
    loss = tl.where(inside, norm - at_target, float("nan"))  # nobody waits to raise an error
    tl.store(losses + row, tl.where(counts, loss, 0.0))


def losses_and_gradient_(logits: Tensor, targets: Tensor, losses: Tensor, scale: float | None) -> None:
    """Write the loss of each row [rows]; in place, logits [rows,vocab] become scale * (softmax - onehot), if any."""
    rows, vocab = logits.shape
    block = min(MAX_BLOCK, triton.next_power_of_2(vocab))
    cross_entropy_kernel[(rows,)](
        logits, targets.contiguous(), losses, scale or 1.0, vocab,
        BLOCK=block, ONE_BLOCK=block >= vocab, GRADIENT=scale is not None, num_warps=max(1, min(16, block // 1024)),
    )  # fmt: skip
