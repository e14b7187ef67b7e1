"""Losses that the device has computed and the host has not read yet: reading one makes the host wait."""

import time
from typing import NamedTuple

import torch
from torch import Tensor

from rebased.train.world import World

STEPS_BETWEEN_READS = {"cuda": 32, "cpu": 1}  # at most; a CPU leaves nothing to wait for
SECONDS_BETWEEN_READS = 0.5  # about; a slow run is read after fewer steps, so that it can be watched


class SeenLoss(NamedTuple):
    """The outcome of one step, over all processes."""

    values: list[float]  # the first two are sums over processes
    tokens: int


class DeferredLosses:
    """A buffer on the device with one row per step that was not read yet."""

    def __init__(self, world: World, *, columns: int, capacity: int | None = None) -> None:
        self._world = world
        self._capacity = capacity or STEPS_BETWEEN_READS[world.device.type]
        self._rows = torch.zeros(self._capacity, columns, dtype=torch.float64, device=world.device)
        self._tokens: list[int] = []
        self._wanted = 1
        self.restart_clock()

    def __len__(self) -> int:
        """The number of steps that were not read yet."""
        return len(self._tokens)

    @property
    def is_due(self) -> bool:
        """True if enough steps wait to be read."""
        return len(self) >= self._wanted

    def restart_clock(self) -> float:
        """Start to time steps now. Returns the seconds since the clock was last read or restarted."""
        now, before = time.perf_counter(), getattr(self, "_started", 0.0)
        self._started = now
        return now - before

    def add(self, outcome: Tensor, tokens: int) -> None:
        """Keep the outcome [columns] of a step over so many tokens."""
        self._rows[len(self)].copy_(outcome)
        self._tokens.append(tokens)

    def read(self) -> tuple[list[SeenLoss], float]:
        """Wait for the device. Returns the steps since the last read, and the seconds they took."""
        rows = self._rows[: len(self)]
        if self._world.size > 1:
            rows = torch.cat([self._world.total(rows[:, :2].contiguous()), rows[:, 2:]], dim=1)
        values = rows.tolist()
        seconds = self.restart_clock()
        seen = [SeenLoss(row, tokens) for row, tokens in zip(values, self._tokens, strict=True)]
        self._tokens.clear()
        if seen:
            self._wanted = max(1, min(self._capacity, int(SECONDS_BETWEEN_READS * len(seen) / max(seconds, 1e-9))))
        return seen, seconds
