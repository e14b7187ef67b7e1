"""Mixers at some positions of each row only: the questions of a synthetic task.

What a mixer computes at a position needs all tokens before it, but its queries, its output and all that follows need
only the position itself. A mixer with `forward_at` leaves the rest out (AttendsAt). `attends_at` says whether that is
faster; any other mixer computes all positions, and those that are wanted are taken (Block.mix_at).
"""

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor


@runtime_checkable
class AttendsAt(Protocol):
    """A mixer that can compute some positions only."""

    def attends_at(self, x: Tensor, n: int) -> bool:
        """Return True if forward_at of n positions per row is faster than forward of x [B,T,D]."""

    def forward_at(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return forward() at these positions only: x [B,T,D], positions [B,n] -> [B,n,D]."""


def rows_at(x: Tensor, positions: Tensor) -> Tensor:
    """Return x at these positions of each row: x [B,T,D], positions [B,n] -> [B*n,D]."""
    starts = torch.arange(0, x.shape[0] * x.shape[1], x.shape[1], device=x.device)
    return x.flatten(0, 1).index_select(0, (positions + starts.unsqueeze(1)).flatten())
