"""Trains what a plan has left to train. A run that fails is written down and does not stop the others."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from rebased.runs.sweep_log import SweepLog
from rebased.train.executors import Executor, Failed, Job, Outcome
from rebased.train.sinks import Sink
from rebased.train.sweep.plan import PlannedRun, stand


class Watcher(Protocol):
    """Sees a sweep go by."""

    def sink(self, run: PlannedRun) -> Sink:
        """The ear for one run."""

    def ended(self, run: PlannedRun, score: float | None) -> None:
        """The run is done, diverged or failed, as its status now says."""

    def stopping(self, runs: int) -> None:
        """Ctrl-C or SIGTERM has come, and so many runs are being saved."""


def train_runs(runs: Sequence[PlannedRun], log: SweepLog, executor: Executor, watcher: Watcher) -> bool:
    """Train or resume the runs; False: it was interrupted, and what was under way has been saved."""
    for run in runs:
        if run.status == "failed":
            log.retry(run.digest)

    def ended(index: int, outcome: Outcome) -> None:
        run = runs[index]
        if isinstance(outcome, Failed):
            status, error = stand(run.folder, outcome.error)  # a run that diverged has said so in its record
            if status != "diverged":
                status, error = "failed", outcome.error
                log.failed(run.digest, outcome.error)
            watcher.ended(replace(run, status=status, error=error), None)
        elif outcome.status != "interrupted":
            watcher.ended(replace(run, status="done"), outcome.score)

    outcomes = executor.run([Job(run.config, run.folder, watcher.sink(run)) for run in runs], ended, watcher.stopping)
    return not any(outcome is None or getattr(outcome, "status", None) == "interrupted" for outcome in outcomes)
