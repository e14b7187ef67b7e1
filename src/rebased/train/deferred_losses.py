"""Losses that the device has computed and nobody has looked at yet: to look is to wait for it."""

import time
from typing import NamedTuple

import torch
from torch import Tensor

AT_MOST = {"cuda": 32, "cpu": 1}  # steps between two looks; a CPU leaves nothing to wait for
SECONDS = 0.5  # and not much longer than this, so that a slow run can be watched


class SeenLoss(NamedTuple):
    mean: float  # over the labelled tokens of the step
    labels: int
    tokens: int


class LossLog:
    def __init__(self, device: torch.device) -> None:
        self._at_most = AT_MOST[device.type]
        self._losses = torch.zeros(self._at_most, 2, dtype=torch.float64, device=device)
        self._tokens: list[int] = []
        self._wanted = 1
        self.restart()

    def __len__(self) -> int:
        """How many steps are waiting to be seen."""
        return len(self._tokens)

    @property
    def is_due(self) -> bool:
        return len(self) >= self._wanted

    def restart(self) -> None:
        """Time that passed until now is not the steps'."""
        self._started = time.perf_counter()

    def add(self, outcome: Tensor, tokens: int) -> None:
        """outcome [2]: mean loss and labels, of a step that saw so many tokens."""
        self._losses[len(self)].copy_(outcome)
        self._tokens.append(tokens)

    def read(self) -> tuple[list[SeenLoss], float]:
        """Wait for the device: the losses since the last time, and the seconds they took."""
        values = self._losses[: len(self)].tolist()
        seconds = time.perf_counter() - self._started
        seen = [
            SeenLoss(mean, int(labels), tokens) for (mean, labels), tokens in zip(values, self._tokens, strict=True)
        ]
        self._tokens.clear()
        self._wanted = max(1, min(self._at_most, int(SECONDS * len(seen) / seconds)))
        return seen, seconds
