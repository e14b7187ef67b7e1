"""What a training step reads: the order of examples, a function of (seed, epoch), and what each row asks."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from rebased.tasks.contract import BLOCK_ROWS, IGNORE, Examples
from rebased.tasks.draws import mix_seed


class Batch(NamedTuple):
    """The examples of one training step."""

    segment: int  # the examples of one batch share their length, so they come from one segment
    rows: Tensor  # [<= batch_size] int64 on the CPU: which of the segment's examples


def epoch_batches(sizes: Sequence[int], batch_size: int, seed: int, epoch: int) -> list[Batch]:
    """Every example of every segment once, segments interleaved at random; a segment's last batch may be smaller."""
    if not sizes or min(sizes) < 1:
        raise ValueError(f"sizes must give at least one segment, each of at least one example, got {list(sizes)}")
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    generator = Generator().manual_seed(mix_seed(seed, epoch))
    batches = [
        Batch(segment, rows)
        for segment, size in enumerate(sizes)
        for rows in torch.randperm(size, generator=generator).split(batch_size)
    ]
    return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]


class Questions(NamedTuple):
    """All rows are padded to the largest number of questions. Padding has the target IGNORE, at position 0."""

    inputs: Tensor  # [N,T] int64
    positions: Tensor  # [N,n] int64, rising in each row
    targets: Tensor  # [N,n] int64

    def take(self, rows: Tensor) -> "Questions":
        """These rows [B], in this order; where nothing has to wait for the device."""
        return Questions(*(part.index_select(0, rows) for part in self))

    def split(self, rows: int) -> list["Questions"]:
        """The questions in groups of `rows` rows; the last group may be smaller."""
        return [Questions(*parts) for parts in zip(*(part.split(rows) for part in self), strict=True)]


def find_questions(examples: Examples) -> Questions:
    """The questions of all rows. The host asks the device once for the largest number of questions per row."""
    inputs, labels = examples.inputs, examples.labels
    n = int((labels != IGNORE).sum(1).max())
    positions, targets = labels.new_empty(len(labels), n), labels.new_empty(len(labels), n)
    at = torch.arange(labels.shape[1], device=labels.device)
    blocks = (each.split(BLOCK_ROWS) for each in (labels, positions, targets))
    for rows, position, target in zip(*blocks, strict=True):  # in blocks: it bounds the scratch memory
        asked = rows != IGNORE
        column = torch.where(asked, asked.cumsum(1) - 1, n)  # the r-th question goes to column r - 1; the rest to n
        position.copy_(rows.new_zeros(len(rows), n + 1).scatter_(1, column, at.expand_as(rows))[:, :n])
        target.copy_(rows.new_full((len(rows), n + 1), IGNORE).scatter_(1, column, rows)[:, :n])
    return Questions(inputs, positions, targets)
