"""The interface of an executor: jobs go in, outcomes come out."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from rebased.runs.run_config import RunConfig
from rebased.train.lifecycle import RunResult
from rebased.train.sinks import Sink


class Job(NamedTuple):
    """A run to train or resume."""

    config: RunConfig
    folder: Path
    sink: Sink  # receives the run's events in the calling process


class Failed(NamedTuple):
    """The outcome of a run that ended with an error."""

    error: str  # one line
    memory: bool = False  # True if the GPU had too little free memory: alone, or later, it may have enough


Outcome = RunResult | Failed
Ended = Callable[[int, Outcome], None]
"""`ended(index, outcome)` is called once per job that has ended. If it raises, the other jobs are ended too."""

Stopping = Callable[[int], None]
"""`stopping(runs)` is called once after Ctrl-C or SIGTERM, or when the queue's time is up, with the number of runs that
are being saved."""

Prepare = Callable[[], None]
"""Called first in each worker: registers the mixers and tasks that configs name. It must be picklable."""

MAX_LOSSES = 3
"""A run has failed when its process has died this many times, for whatever reason. Before that it is resumed from its
checkpoint each time."""


def noop(*_: object) -> None:
    """Does nothing: the default of `Prepare` and `Stopping`."""


class Queue(Protocol):
    """Decides which job an executor starts next, and when those in progress are to be saved."""

    def next(self) -> int | None:
        """The index of the job to start now, each once; None if there is none now. It is asked for while a worker is
        free, and again after a job has ended."""

    def is_time_up(self) -> bool:
        """True if the jobs in progress are to be saved now, as after Ctrl-C."""


class InOrder(Queue):
    """All jobs, one after the other, without a limit of time."""

    def __init__(self, jobs: int) -> None:
        self._waiting = iter(range(jobs))

    def next(self) -> int | None:
        return next(self._waiting, None)

    def is_time_up(self) -> bool:
        return False


class Executor(Protocol):
    """Trains jobs in worker processes, several at once."""

    workers: int  # runs at once
    gpus: int  # that the workers share; 0: they use CPU cores

    @property
    def where(self) -> str:
        """Where runs are trained, in words: "2 processes of this machine, one CPU thread each"."""

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The return value of `function(*arguments)`, called in a worker process. What it raises is raised here."""

    def run(
        self, jobs: Sequence[Job], ended: Ended, stopping: Stopping = noop, queue: Queue | None = None
    ) -> list[Outcome | None]:
        """Train or resume every job, or those that the queue names. Returns one outcome per job, in the order of the
        jobs.

        A run that fails does not stop the others. Ctrl-C or SIGTERM saves the runs in progress, and so does a queue
        whose time is up: they return with status "interrupted". Jobs that had not begun have the outcome None. A second
        Ctrl-C kills the runs and raises KeyboardInterrupt; they can be resumed from their last checkpoints.
        """

    def close(self) -> None:
        """Release what the executor holds. No run is in progress when it is called."""
