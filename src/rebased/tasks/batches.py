"""The order in which examples are trained on: a function of (seed, epoch) alone, so a resumed run needs no state."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Generator, Tensor

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
