"""Train the runs of a plan. A run that fails is logged and does not stop the others."""

from dataclasses import replace
from typing import Literal, Protocol

from rebased.runs.record import lines_so_far
from rebased.runs.sweep_log import SweepLog
from rebased.train.executors import Executor, Failed, Job, Outcome
from rebased.train.sinks import Sink
from rebased.train.sweep.plan import PlannedRun, status_of
from rebased.train.sweep.queue import SweepQueue


class Watcher(Protocol):
    """Follows a sweep, for example to show its progress."""

    def sink(self, run: PlannedRun) -> Sink:
        """The sink that receives the events of one run."""

    def ended(self, run: PlannedRun, score: float | None) -> None:
        """Called when a run is done, diverged or failed, with its new status. `score` is None unless it is done."""

    def stopping(self, runs: int, *, time_is_up: bool) -> None:
        """Called once after Ctrl-C or SIGTERM, or when the time is up, with the number of runs that are being saved."""


Ending = Literal["complete", "interrupted", "out_of_time"]
"""How a call of `train_runs` ended: nothing is left to train, or the user stopped it, or the time was up or too short
for the runs that are left."""


def train_runs(queue: SweepQueue, log: SweepLog, executor: Executor, watcher: Watcher) -> Ending:
    """Train or resume the runs of the queue. The runs in progress are saved when the user or the time ends it."""
    runs = queue.runs
    for run in runs:
        if run.status == "failed":
            log.retry(run.digest)

    def ended(index: int, outcome: Outcome) -> None:
        run = runs[index]
        if isinstance(outcome, Failed):
            status, error, lines = status_of(run.folder, outcome.error)  # the record of a diverged run says so
            if status != "diverged":
                status, error = "failed", outcome.error
                log.failed(run.digest, outcome.error)
            queue.ended(run, status, lines)
            watcher.ended(replace(run, status=status, error=error), None)
        elif outcome.status != "interrupted":
            queue.ended(run, "done", lines_so_far(run.folder))
            watcher.ended(replace(run, status="done"), outcome.score)

    jobs = [Job(run.config, run.folder, watcher.sink(run)) for run in runs]
    outcomes = executor.run(jobs, ended, lambda runs: watcher.stopping(runs, time_is_up=queue.is_time_up()), queue)
    interrupted = any(getattr(outcome, "status", None) == "interrupted" for outcome in outcomes)
    if not interrupted and (not queue.not_begun or queue.is_stuck):
        return "complete"
    if queue.budget and (queue.is_time_up() or not interrupted):
        return "out_of_time"
    return "interrupted"
