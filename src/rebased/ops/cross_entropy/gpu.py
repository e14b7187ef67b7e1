# mypy: allow-untyped-defs
"""Softmax cross-entropy of a chunk of logits on a GPU: one program per row, the gradient written over the logits.

A row that fits is read once and stays in registers. A longer row is read twice, the second time from the cache.
"""

import triton
import triton.language as tl
from torch import Tensor

from rebased.ops.comparison import some
from rebased.ops.cross_entropy import reference
from rebased.ops.cross_entropy.reference import IGNORE
from rebased.ops.kernel_launch import launch
from rebased.ops.self_check import checked

MAX_TILE = 16384  # logits that a program holds at once: 32 per thread of 16 warps
LONG_ROW_TILE = 4096  # of a longer row: 16 per thread
IGNORE_ = tl.constexpr(IGNORE)
LEAST = tl.constexpr(-3e38)  # finite, so that the difference of two is not NaN


@triton.jit
def _store_gradient(logits, x, columns, norm, target, counts, scale, vocab):
    """Stores scale * (softmax(x) - onehot(target)) at these columns; 0 in an ignored row."""
    gradient = tl.exp(x - norm) - tl.where(columns == target, 1.0, 0.0)
    gradient = tl.where(counts, scale * gradient, 0.0)
    tl.store(logits + columns, gradient.to(logits.dtype.element_ty), mask=columns < vocab)


@triton.jit
def cross_entropy_kernel(
    logits, targets, losses, scale, vocab,
    TILE: tl.constexpr, ONE_TILE: tl.constexpr, GRADIENT: tl.constexpr,
):  # fmt: skip
    """losses [rows] of logits [rows, vocab], 0 in ignored rows. With GRADIENT, logits become their gradient."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocab
    target = tl.load(targets + row)
    counts = target != IGNORE_
    inside = (target >= 0) & (target < vocab)
    at_target = tl.load(logits + target, mask=inside, other=0.0).to(tl.float32)  # before it is overwritten
    columns = tl.arange(0, TILE)
    if ONE_TILE:
        x = tl.load(logits + columns, mask=columns < vocab, other=-float("inf")).to(tl.float32)
        top = tl.max(x, 0)
        norm = top + tl.log(tl.sum(tl.exp(x - top), 0))
        if GRADIENT:
            _store_gradient(logits, x, columns, norm, target, counts, scale, vocab)
    else:
        # Maximum and sum of every TILE-th logit: threads exchange numbers only once, at the end.
        tops = tl.full([TILE], LEAST, tl.float32)
        totals = tl.zeros([TILE], tl.float32)
        for start in range(0, vocab, TILE):
            x = tl.load(logits + start + columns, mask=start + columns < vocab, other=-float("inf")).to(tl.float32)
            new = tl.maximum(tops, x)
            totals = totals * tl.exp(tops - new) + tl.exp(x - new)
            tops = new
        top = tl.max(tops, 0)
        norm = top + tl.log(tl.sum(totals * tl.exp(tops - top), 0))
        if GRADIENT:
            for start in range(0, vocab, TILE):
                x = tl.load(logits + start + columns, mask=start + columns < vocab, other=-float("inf")).to(tl.float32)
                _store_gradient(logits, x, start + columns, norm, target, counts, scale, vocab)
    loss = tl.where(inside, norm - at_target, float("nan"))  # raising an error would wait for the device
    tl.store(losses + row, tl.where(counts, loss, 0.0))


def _some_rows(args, results):
    logits, targets, losses, scale = args
    known = (targets == IGNORE) | ((targets >= 0) & (targets < logits.shape[1]))  # the others' losses are NaN
    known = known.nonzero().flatten()
    chosen = known[some(len(known), max(4, min(64, 2**22 // logits.shape[1])))]
    return (logits[chosen], targets[chosen], losses[chosen], scale), [each[chosen] for each in results]


@checked(reference.losses_and_gradient_, sample=_some_rows)
def losses_and_gradient_(logits: Tensor, targets: Tensor, losses: Tensor, scale: float | None) -> None:
    """Writes the loss of each row and the gradient over the logits, as reference.losses_and_gradient_ does."""
    rows, vocab = logits.shape
    one_tile = vocab <= MAX_TILE
    tile = triton.next_power_of_2(vocab) if one_tile else LONG_ROW_TILE
    launch(
        cross_entropy_kernel, (rows,),
        logits, targets.contiguous(), losses, scale or 1.0, vocab,
        TILE=tile, ONE_TILE=one_tile, GRADIENT=scale is not None,
        num_warps=max(1, min(16, tile // (1024 if one_tile else 512))), overwrites=(logits, losses),
    )  # fmt: skip
