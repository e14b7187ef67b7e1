"""What an executor is given, what it gives back, and how it is asked."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from rebased.runs.base_config import BaseRunConfig
from rebased.train.lifecycle import RunResult
from rebased.train.sinks import Sink


class Job(NamedTuple):
    config: BaseRunConfig
    folder: Path
    sink: Sink  # hears of the run in the process that called


class Failed(NamedTuple):
    error: str  # in one line


Outcome = RunResult | Failed
Ended = Callable[[int, Outcome], None]
"""Called once for every job that has ended, with its place among the jobs; what it raises ends the others too."""

Stopping = Callable[[int], None]
"""Called once when Ctrl-C or SIGTERM has come, with the number of runs that are being saved: it can take seconds."""

Prepare = Callable[[], None]
"""Called in each worker before anything else: makes known the mixers that configs name. It must be picklable."""

MAX_LOSSES = 3
"""So often may the process of a run be lost, killed from outside or by its own fault, before the run counts as failed.
Each time it goes on from its checkpoint."""


def nothing() -> None:
    """What there is to prepare where all mixers are this package's own."""


def noop(runs: int) -> None:
    """For those who need not know that runs are being saved."""


class Executor(Protocol):
    workers: int  # runs at once

    @property
    def where(self) -> str:
        """In words, for those who read a plan."""

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What the function returns where a run would be trained."""

    def run(self, jobs: Sequence[Job], ended: Ended, stopping: Stopping = noop) -> list[Outcome | None]:
        """Train or resume every job; the outcomes in the order of the jobs.

        A run that fails does not stop the others. Ctrl-C or SIGTERM saves the runs under way: their results have the
        status "interrupted", and those that had not begun are None. A second one ends them where they are, and raises
        KeyboardInterrupt: they go on from their last checkpoints.
        """

    def close(self) -> None: ...
