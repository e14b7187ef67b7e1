"""The order in which examples are trained on: a function of (seed, epoch) alone, so a resumed run needs no state."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Generator, Tensor


class Batch(NamedTuple):
    segment: int  # the examples of one batch share their length, so they come from one segment
    rows: Tensor  # [<= batch_size] int64 on the CPU: which of the segment's examples


def epoch_batches(sizes: list[int], batch_size: int, seed: int, epoch: int) -> list[Batch]:
    """Every example of every segment once, segments interleaved at random; a segment's last batch may be smaller."""
    if not sizes or min(sizes) < 1:
        raise ValueError(f"sizes must name at least one segment of at least one example, got {sizes}")
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    # seed + epoch would make epoch 1 of seed 42 the epoch 0 of seed 43
    (mixed,) = np.random.SeedSequence((seed, epoch)).generate_state(1, np.uint64)
    generator = Generator().manual_seed(int(mixed))
    batches = [
        Batch(segment, rows)
        for segment, size in enumerate(sizes)
        for rows in torch.randperm(size, generator=generator).split(batch_size)
    ]
    return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]
