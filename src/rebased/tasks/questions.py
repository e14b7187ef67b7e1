"""Examples by what is asked: where the labels of each row stand and what they are, found once for all steps."""

from typing import NamedTuple

import torch
from torch import Tensor

from rebased.tasks.contract import BLOCK_ROWS, IGNORE, Examples


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
    """The questions of all rows. The host asks the device once how many questions a row has at most."""
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
