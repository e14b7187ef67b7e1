"""The order of work of a sweep: chosen so that a sweep that is stopped half-way is already a result.

Runs that have begun come first. Then all models of one task, width and learning rate follow one another, over all
tasks, widths and rates with the first seed; then with the second seed, and so on. So after each seed every model has
been compared with every other one on the same terms. Seeds, tasks, widths, rates and models have the order of the grid.
A suite (`by_task`) finishes one task after the other.
"""

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any, Literal, Protocol

from rebased.runs.record import lines_so_far
from rebased.runs.sweep_log import SweepLog
from rebased.train.executors.jobs import Executor, Failed, Job, Outcome, Queue
from rebased.train.kinds import workload_of
from rebased.train.sinks import Sink
from rebased.train.sweep.cost import Estimate
from rebased.train.sweep.plan import PlannedRun, Status, status_of
from rebased.train.sweep.stages import Stages

RESERVE = 20.0  # seconds at the end of the time for saving runs and writing the bundle; at most a tenth of the time


def order_of_work(
    runs: Sequence[PlannedRun], grid: Sequence[PlannedRun] | None = None, *, by_task: bool = False
) -> list[PlannedRun]:
    """The runs in the order in which they are trained. `grid` has all runs of the sweep, of which some are done: their
    values come first, second, ... as in the whole grid. With `by_task` tasks come before seeds."""

    def rank(key: Callable[[PlannedRun], Hashable]) -> Callable[[PlannedRun], int]:
        places = {value: n for n, value in enumerate(dict.fromkeys(map(key, grid or runs)))}
        return lambda run: places[key(run)]

    seed, task = rank(lambda run: run.config.train.seed), rank(lambda run: run.task)
    width, lr = rank(lambda run: run.config.model.d_model), rank(lambda run: run.config.train.lr)
    model = rank(lambda run: run.model)
    first, second = (task, seed) if by_task else (seed, task)
    return sorted(
        runs, key=lambda run: (run.status != "begun", first(run), second(run), width(run), lr(run), model(run))
    )


class TimeBudget:
    """The time that a sweep has (`--for`), and which runs still fit into it.

    `cost` has the estimates. They are corrected by the pace of the runs that have ended. With `may_break_off` a run
    need not fit: its checkpoint is kept.
    """

    def __init__(
        self,
        total: float,
        cost: Estimate,
        *,
        may_break_off: bool,
        started: float | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total, self.may_break_off, self._cost, self._now = total, may_break_off, cost, now
        self._overhead = 0.0 if started is None else now() - started
        self._end = now() - self._overhead + total - min(RESERVE, total / 10)
        self._began: dict[str, float] = {}  # runs in progress
        self._actual = self._expected = 0.0

    @property
    def left(self) -> float:
        """Seconds until running runs are saved; negative after that."""
        return self._end - self._now()

    @property
    def is_up(self) -> bool:
        """True if running runs are to be saved now."""
        return self.left <= 0

    def seconds(self, run: PlannedRun) -> float:
        """The estimate for a run."""
        return self._cost.seconds[run.digest]

    def fits(self, run: PlannedRun) -> bool:
        """True if a run is worth starting: it will end in time, or what it does is not lost."""
        return self.may_break_off or run.status == "begun" or self.seconds(run) * self._pace <= self.left

    def enough_for(self, runs: Sequence[PlannedRun]) -> float:
        """The total with which the same command would start one of these runs; 0 if any total would."""
        if self.may_break_off or self._began or not runs or any(run.status == "begun" for run in runs):
            return 0.0
        return self._overhead + 1.25 * self._pace * min(map(self.seconds, runs)) + RESERVE

    @property
    def _pace(self) -> float:
        return self._actual / self._expected if self._expected else 1.0

    def began(self, run: PlannedRun) -> None:
        """Note that a run has been started."""
        self._began[run.digest] = self._now()

    def ended(self, run: PlannedRun, lines: Sequence[dict[str, Any]]) -> None:
        """Correct the pace by a run that has ended, by the work in its record: it may have stopped early."""
        work = workload_of(run.config).recorded_work
        done = work(run.config, lines)[0] - work(run.config, run.lines)[0]
        planned = self._cost.work.get(run.digest, 0.0)
        began = self._began.pop(run.digest, None)
        if done > 0 and planned > 0 and began is not None:
            self._actual += self._now() - began
            self._expected += self.seconds(run) * done / planned


class SweepQueue(Queue):
    """The runs of a sweep that are to be trained, in the order of work, as far as stages and time allow."""

    def __init__(
        self,
        runs: Sequence[PlannedRun],
        stages: Stages | None = None,
        budget: TimeBudget | None = None,
        grid: Sequence[PlannedRun] | None = None,
        *,
        by_task: bool = False,
    ) -> None:
        """`runs` are to be trained, of all runs in `grid`, which gives the order."""
        self.runs, self.stages, self.budget = order_of_work(runs, grid, by_task=by_task), stages, budget
        self._waiting = list(range(len(self.runs)))
        for run in runs:
            if stages and run.status == "failed":
                stages.again(run.digest)

    def next(self) -> int | None:
        if self.is_time_up():
            return None
        for roles in (("first", "chosen"), ("other",) if self._takes_others else ()):
            for index in self._waiting:
                run = self.runs[index]
                if self._role(run) in roles and (self.budget is None or self.budget.fits(run)):
                    self._waiting.remove(index)
                    if self.budget:
                        self.budget.began(run)
                    return index
        return None

    def is_time_up(self) -> bool:
        return self.budget is not None and self.budget.is_up

    def ended(self, run: PlannedRun, status: Status, lines: Sequence[dict[str, Any]]) -> None:
        """Note how a run has ended, with the lines of its record."""
        if self.stages:
            self.stages.ended(run.digest, None if status == "failed" else run.config.score(lines))
        if self.budget and status != "failed":
            self.budget.ended(run, lines)

    @property
    def left_out(self) -> list[PlannedRun]:
        """Runs that are never trained, because another value was chosen."""
        return [run for index in self._waiting if self._is_left_out(run := self.runs[index])]

    @property
    def not_begun(self) -> list[PlannedRun]:
        """Runs that have not been started, although nothing but time is in their way, or a choice that time delays."""
        return [run for index in self._waiting if not self._is_left_out(run := self.runs[index])]

    @property
    def is_stuck(self) -> bool:
        """True if all runs that have not been started wait for a choice among runs of which every one has failed."""
        stages = self.stages
        return stages is not None and all(stages.is_stuck(run) for run in self.not_begun)

    @property
    def _takes_others(self) -> bool:
        return self.stages is None or self.stages.select.others == "last"

    def _role(self, run: PlannedRun) -> str:
        return self.stages.role(run) if self.stages else "chosen"

    def _is_left_out(self, run: PlannedRun) -> bool:
        return not self._takes_others and self._role(run) == "other"


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
