"""The processes that share a run: one, or those that torchrun has started."""

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
from rebased.runs.base_config import BaseRunConfig
from rebased.runs.lm_config import TextRunConfig

PATIENCE = timedelta(minutes=10)
"""How long a process waits for another one. Then it ends, with an error, rather than hang for ever."""

Answer = TypeVar("Answer")


class ToldElsewhere(ValueError):
    """An error that the first process raises too, and tells: one message is enough."""


class LostProcess(OSError):
    """Another process of this run is no longer there."""


@dataclass(frozen=True)
class World:
    rank: int
    size: int
    device: torch.device

    @property
    def is_rank_zero(self) -> bool:
        """True in the process of rank 0, which writes files and prints."""
        return self.rank == 0

    def total(self, tensor: Tensor) -> Tensor:
        """The sum over all processes, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def any(self, flag: bool) -> bool:
        """Whether it holds in one of the processes: all of them get the same answer."""
        if self.size == 1:
            return flag
        return bool(self.total(torch.tensor(int(flag), device=self.device)).item())

    def gather(self, value: Any) -> list[Any]:
        """What each process says, in the order of their ranks."""
        values = [value]
        if self.size > 1:
            values = [None] * self.size
            dist.all_gather_object(values, value)
        return values

    def together(self, act: Callable[[], Answer]) -> Answer:
        """Every process acts; where one of them fails on bad input or a bad disk, all of them end with its error."""
        answer, error = None, None
        try:
            answer = act()
        except (ValueError, OSError) as caught:
            if self.size == 1:
                raise
            error = caught
        errors = self.gather(error)
        first = next((i for i, each in enumerate(errors) if each is not None), None)
        if first is None:
            return answer  # type: ignore[return-value]
        raise errors[first] if first == self.rank else ToldElsewhere(str(errors[first]))


def started_processes() -> int:
    """As torchrun tells each of them."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def why_not_shared(config: TextRunConfig, size: int) -> str | None:
    """What keeps so many processes from sharing this run, if anything does."""
    train, T = config.train, config.data.seq_len
    if train.parallel == "none":
        return f"torchrun started {size} processes and train.parallel is none; set it to ddp, fsdp or context"
    if train.parallel == "context":
        return f"data.seq_len {T} cannot be shared by {size} processes; choose a multiple" if T % size else None
    if train.batch_size % size:
        return f"train.batch_size {train.batch_size} cannot be shared by {size} processes; choose a multiple"
    return None


@contextmanager
def join_world(config: BaseRunConfig) -> Iterator[World]:
    """The world of this process. On a GPU each process has a card of its own and they talk through NCCL, else gloo."""
    size, rank = started_processes(), int(os.environ.get("RANK", "0"))
    device = choose_device(config.train.device)
    if size == 1 or not isinstance(config, TextRunConfig):
        yield World(0, 1, device)
        return
    if message := why_not_shared(config, size):
        raise ValueError(message) if rank == 0 else ToldElsewhere(message)
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
            f"process {rank} of {size} lost another one ({reason}); start all of them again with --resume"
        ) from error
    dist.destroy_process_group()  # not after an error: the others may never come


def _is_lost_connection(error: Exception) -> bool:
    words = ("connection", "socket", "nccl", "timed out", "timeout", "peer")
    return isinstance(error, dist.DistError) or any(word in str(error).lower() for word in words)
