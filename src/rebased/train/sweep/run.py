"""Train the runs of a plan. A run that fails is logged and does not stop the others."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from rebased.runs.sweep_log import SweepLog
from rebased.train.executors import Executor, Failed, Job, Outcome
from rebased.train.sinks import Sink
from rebased.train.sweep.plan import PlannedRun, status_of


class Watcher(Protocol):
    """Follows a sweep, for example to show its progress."""

    def sink(self, run: PlannedRun) -> Sink:
        """The sink that receives the events of one run."""

    def ended(self, run: PlannedRun, score: float | None) -> None:
        """Called when a run is done, diverged or failed, with its new status. `score` is None unless it is done."""

    def stopping(self, runs: int) -> None:
        """Called once after Ctrl-C or SIGTERM, with the number of runs that are being saved."""


def train_runs(runs: Sequence[PlannedRun], log: SweepLog, executor: Executor, watcher: Watcher) -> bool:
    """Train or resume the runs. Returns False if they were interrupted; the runs in progress are then saved."""
    for run in runs:
        if run.status == "failed":
            log.retry(run.digest)

    def ended(index: int, outcome: Outcome) -> None:
        run = runs[index]
        if isinstance(outcome, Failed):
            status, error = status_of(run.folder, outcome.error)  # the record of a diverged run says so
            if status != "diverged":
                status, error = "failed", outcome.error
                log.failed(run.digest, outcome.error)
            watcher.ended(replace(run, status=status, error=error), None)
        elif outcome.status != "interrupted":
            watcher.ended(replace(run, status="done"), outcome.score)

    outcomes = executor.run([Job(run.config, run.folder, watcher.sink(run)) for run in runs], ended, watcher.stopping)
    return not any(outcome is None or getattr(outcome, "status", None) == "interrupted" for outcome in outcomes)
