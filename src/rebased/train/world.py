"""The processes that train a run together: one, or those that torchrun has started."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from rebased.ops.backend import choose_device

PATIENCE = timedelta(minutes=10)
"""How long a process waits for another one before it ends with an error."""

Answer = TypeVar("Answer")


class ReportedElsewhere(ValueError):
    """An error that another process of this run raises and prints. This process ends without printing it again."""


class LostProcess(OSError):
    """The connection to another process of this run is lost."""


@dataclass(frozen=True)
class World:
    """The rank of this process among those that train the run, and its device.

    Methods that communicate are called by all processes in the same order. With `size` 1 nothing is communicated.
    """

    rank: int
    size: int
    device: torch.device

    @property
    def is_rank_zero(self) -> bool:
        """True in the process of rank 0, which writes files and prints."""
        return self.rank == 0

    def total(self, tensor: Tensor) -> Tensor:
        """The sum of `tensor` over all processes, computed in place. Any shape, on `device`."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def any(self, flag: bool) -> bool:
        """True in every process if `flag` is True in at least one of them."""
        if self.size == 1:
            return flag
        return bool(self.total(torch.tensor(int(flag), device=self.device)).item())

    def gather(self, value: Any) -> list[Any]:
        """The values that the processes passed, in the order of their ranks. Values must be picklable."""
        values = [value]
        if self.size > 1:
            values = [None] * self.size
            dist.all_gather_object(values, value)
        return values

    def together(self, function: Callable[[], Answer]) -> Answer:
        """The return value of `function`, which every process calls. If it fails in one process, it fails in all.

        A ValueError or OSError is raised by the first process in which it happened. The other processes raise
        ReportedElsewhere with the same text, so that none of them waits for one that has ended.
        """
        answer, error = None, None
        try:
            answer = function()
        except (ValueError, OSError) as caught:
            if self.size == 1:
                raise
            error = caught
        errors = self.gather(error)
        first = next((i for i, each in enumerate(errors) if each is not None), None)
        if first is None:
            return answer  # type: ignore[return-value]
        raise errors[first] if first == self.rank else ReportedElsewhere(str(errors[first]))

    def on_rank_zero(self, function: Callable[[], None]) -> None:
        """Call `function` in the process of rank 0. If it fails there, it fails in all, as in `together`."""
        self.together(function if self.is_rank_zero else lambda: None)


def started_processes() -> int:
    """The number of processes that torchrun has started; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def refusal(message: str) -> ValueError:
    """The error to raise before the processes have joined: the process of rank 0 prints it."""
    return ValueError(message) if _rank() == 0 else ReportedElsewhere(message)


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


@contextmanager
def join_world(device_name: str, size: int) -> Iterator[World]:
    """The World of this process, one of `size`. On GPUs each process uses one of its own, and the backend is NCCL; on
    CPUs gloo."""
    rank, device = _rank(), choose_device(device_name)
    if size == 1:
        yield World(0, 1, device)
        return
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank % torch.cuda.device_count())))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=PATIENCE)
    try:
        yield World(rank, size, device)
    except (RuntimeError, dist.DistError) as error:
        if not _is_lost_connection(error):
            raise
        reason = str(error).splitlines()[0]
        raise LostProcess(
            f"process {rank} of {size} lost the connection to another one ({reason}); start all of them again "
            "with --resume"
        ) from error
    dist.destroy_process_group()  # not after an error: it would wait for processes that are gone


def _is_lost_connection(error: Exception) -> bool:
    words = ("connection", "socket", "nccl", "timed out", "timeout", "peer")
    return isinstance(error, dist.DistError) or any(word in str(error).lower() for word in words)
