"""How a sweep is shown: its plan, then its progress, as a live table in a terminal or as one line per run in a log."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import compress
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table as Grid
from rich.text import Text

from rebased.cli.output import say
from rebased.cli.progress import Status, being_saved
from rebased.cli.rich_table import TerminalTable
from rebased.config import grouped, plural
from rebased.report.tables import Table
from rebased.train import RunStart, Sink, StepReport
from rebased.train.executors.jobs import Executor
from rebased.train.sweep.cost import Estimate
from rebased.train.sweep.plan import Plan, PlannedRun
from rebased.train.sweep.queue import Watcher
from rebased.train.sweep.stages import Stages

SHOWN = 8  # runs in progress that the table lists
BAR = 20  # letters of the bar of progress
ENDED = ("done", "diverged", "failed")
SILENCE = 60.0  # seconds after which a log gets a line about the runs in progress


def plan_table(plan: Plan) -> TerminalTable:
    """A table of the plan: one row per model and task, with the number of runs, and of those that have a status."""
    shown = {"done": ("done", "diverged"), "begun": ("begun",), "failed": ("failed",)}
    shown = {name: statuses for name, statuses in shown.items() if count(plan.runs, *statuses)}
    rows = []
    for (model, task), runs in grouped(plan.runs, lambda run: (run.model, run.task)).items():
        widths = ", ".join(map(str, sorted({run.config.model.d_model for run in runs})))
        numbers = (f"{count(runs, *statuses) or '-'}" for statuses in shown.values())
        rows.append((model, task, widths, f"{len(runs)}", *numbers))
    return TerminalTable(Table(("model", "task", "D", "runs", *shown), rows))


def count(runs: Iterable[PlannedRun], *statuses: str) -> int:
    """The number of runs that have one of these statuses."""
    return sum(run.status in statuses for run in runs)


def describe_plan(
    plan: Plan,
    runs: Sequence[PlannedRun],
    cost: Estimate,
    executor: Executor,
    retry_failed: bool,
    stages: Stages | None = None,
) -> Iterator[str]:
    """Sentences about a plan: how many runs there are, where they are trained and how long it will take."""
    merged = f" ({plural(plan.merged, 'grid point')} less: the same run as another)" if plan.merged else ""
    total, done = len(plan.runs), plan.count("done", "diverged")
    left = [run for run in runs if not stages or stages.share(run) > 0]
    to_train = round(sum(map(stages.share, left))) if stages else len(left)
    yield f"{plural(total, 'run')}{merged}: {done} done, {to_train} to train in {plan.folder}"
    if (failed := plan.count("failed")) and not retry_failed:
        yield f"{failed} failed before, not repeated; --retry-failed tries again"
    for what, count in plan.outdated().items():
        yield (
            f"warning: {what} has changed since {plural(count, 'run')} began; they count as they are. To train all "
            "with the changed one, choose another folder (--out) and leave out --known"
        )
    if stages:
        yield from describe_stages(stages, runs)
    yield executor.where
    if left:
        least, most = duration(cost.least), duration(cost.most)
        about = f"about {least}" if least == most else f"{least} to {most}"
        yield f"{'the time is not known:' if cost.total is None else f'{about},'} {cost.basis}"


def describe_stages(stages: Stages, runs: Sequence[PlannedRun]) -> Iterator[str]:
    """A sentence about the stages of a sweep. `runs` are left to train."""
    select = stages.select
    roles = [stages.role(run) for run in runs]
    others = "left out" if select.others == "skip" else "trained last"
    yield (
        f"stages: {select.setting} is chosen on the first {plural(select.seeds, 'seed')} of each cell "
        f"({plural(roles.count('first'), 'run')} left); "
        f"then the other seeds ({plural(roles.count('chosen'), 'run')} of chosen values, "
        f"{roles.count('waiting')} wait for {plural(stages.undecided, 'choice')}); {roles.count('other')} of other "
        f"values are {others}"
    )


def duration(seconds: float) -> str:
    """A time in words, rounded as an estimate should be: "45 s", "12 min", "3.5 h", "12 days"."""
    for limit, size, unit in ((90, 1, "s"), (5400, 60, "min"), (36_000, 3600, "h"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / size:.1f} {unit}" if limit == 36_000 else f"{seconds / size:.0f} {unit}"
    days = seconds / 86_400
    return f"{days:.0f} days" if days < 730 else f"{days / 365:.0f} years"


class Tally:
    """The state of a sweep in numbers: the status and progress of each run, the best scores, the time left."""

    def __init__(self, plan: Plan, cost: Estimate, workers: int, stages: Stages | None = None) -> None:
        self._cost, self._workers, self._stages = cost.seconds, workers, stages
        self.runs = {run.digest: run for run in plan.runs}
        for run in (run for run in plan.runs if run.digest in cost.seconds and run.status == "failed"):
            self.runs[run.digest] = replace(run, status="begun", error=None)  # it is about to be trained again
        self.fraction = dict.fromkeys(cost.seconds, 0.0)  # of what was left of each run when the sweep started
        self.progress: dict[str, str] = {}  # of the runs in progress, in words
        self.best: dict[str, tuple[float, PlannedRun]] = {}
        self._started = time.monotonic()
        for run in plan.runs:
            if run.status == "done":
                self._compare_best(run, run.config.result(run.lines[-1]))

    @property
    def failed(self) -> list[PlannedRun]:
        """The runs that failed."""
        return [run for run in self.runs.values() if run.status == "failed"]

    def count(self, *statuses: str) -> int:
        """The number of runs that have one of these statuses."""
        return count(self.runs.values(), *statuses)

    def ended(self, run: PlannedRun, score: float | None) -> None:
        """Note that a run has ended, with its new status."""
        self.runs[run.digest] = run
        self.fraction[run.digest] = 1.0
        self.progress.pop(run.digest, None)
        self._compare_best(run, score)

    def _compare_best(self, run: PlannedRun, score: float | None) -> None:
        if score is None:
            return
        sign = 1 if run.config.metric == "accuracy" else -1
        if run.model not in self.best or sign * score > sign * self.best[run.model][0]:
            self.best[run.model] = score, run

    def seconds_left(self) -> float:
        """Seconds until the sweep is done: the estimate, corrected by the pace so far.

        The pace is the time spent divided by the estimate for the same work. It says little until each worker has done
        one run. Until then the original estimate is mixed in.
        """
        done = sum(self._cost[digest] * fraction for digest, fraction in self.fraction.items())
        total, spent = self._total(), (time.monotonic() - self._started) * self._workers
        prior = max(0.0, total * min(1.0, self._workers / max(1, len(self._cost))) - done)
        pace = (spent + prior) / (done + prior) if done + prior > 0 else 1.0
        return (total - done) * pace / self._workers

    def _total(self) -> float:
        """The estimate for all runs, without those that a choice among values leaves out."""
        if self._stages is None:
            return sum(self._cost.values())
        share = self._stages.share
        return sum(cost * max(self.fraction[digest], share(self.runs[digest])) for digest, cost in self._cost.items())

    def share_done(self) -> float:
        """The share of the estimated time that has passed since the sweep started."""
        total = self._total()
        return sum(self._cost[digest] * part for digest, part in self.fraction.items()) / total if total else 1.0

    def expected(self, runs: Iterable[PlannedRun] | None = None) -> int:
        """How many of the runs, or of these, have ended or will be trained: a choice among values leaves runs out."""
        found = list(self.runs.values() if runs is None else runs)
        if self._stages is None:
            return len(found)
        return round(sum(1.0 if run.status in ENDED else self._stages.share(run) for run in found))

    def summary(self) -> str:
        """How many runs are done, diverged and failed, in words."""
        others = [f"{self.count(status)} {status}" for status in ("diverged", "failed") if self.count(status)]
        return ", ".join([f"{self.count('done')} of {plural(self.expected(), 'run')} done", *others])


def short_names(runs: Sequence[PlannedRun]) -> dict[str, str]:
    """The names of the runs by digest, without what all of them share: a line of a terminal has little room."""
    differ = [len(set(words)) > 1 for words in zip(*(run.name for run in runs), strict=True)]
    if not any(differ):
        return {run.digest: str(run) for run in runs}
    return {run.digest: ", ".join(compress(run.name, differ)) for run in runs}


class SweepBoard(Watcher):
    """Shows the progress of a sweep. A context manager; subclasses decide how it looks."""

    def __init__(self, console: Console, tally: Tally, keep: Callable[[], None] = lambda: None) -> None:
        """`keep` is called after each run that has ended."""
        self._console, self._tally, self._keep = console, tally, keep
        self._names = short_names(list(tally.runs.values()))
        self._printed = time.monotonic()

    def in_progress(self) -> list[str]:
        """One line per run in progress, the first few of them."""
        progress = self._tally.progress
        lines = [f"{self._names[digest]}: {words}" for digest, words in list(progress.items())[:SHOWN]]
        return [*lines, f"and {len(progress) - SHOWN} more"] if len(progress) > SHOWN else lines

    def head(self) -> str:
        """How many runs are done and running, and the time left."""
        tally = self._tally
        running = f", {len(tally.progress)} running, about {duration(tally.seconds_left())} left"
        return tally.summary() + (running if tally.progress else "")

    def sink(self, run: PlannedRun) -> Sink:
        return _Follower(self._tally, run, self.noted)

    def ended(self, run: PlannedRun, score: float | None) -> None:
        self._tally.ended(run, score)
        self._keep()

    def noted(self) -> None:
        """Called when a run has made progress."""

    def stopping(self, runs: int, *, time_is_up: bool = False) -> None:
        say(self._console, being_saved(runs, time_is_up=time_is_up))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None: ...


class _Follower(Sink):
    """A sink that notes the progress of one run in the tally."""

    def __init__(self, tally: Tally, run: PlannedRun, noted: Callable[[], None]) -> None:
        self._tally, self._run, self._status, self._noted = tally, run, Status(), noted
        self._first, self._steps = 0, 0

    def start(self, run: RunStart) -> None:
        self._first, self._steps = run.step, run.steps
        self._status.start(run)
        self._note()

    def step(self, report: StepReport) -> None:
        if self._steps > self._first:
            self._tally.fraction[self._run.digest] = (report.step - self._first) / (self._steps - self._first)
        self._status.step(report)
        self._note()

    def line(self, line: dict[str, Any]) -> None:
        if not self._steps:  # the executor reads records, which do not have every step
            self._tally.fraction[self._run.digest] = self._run.config.share_done(line)
        if line["type"] == "epoch":
            self._status.epochs, self._status.epoch = self._run.config.train.epochs, line["epoch"]
        self._status.line(line)
        self._note()

    def _note(self) -> None:
        self._tally.progress[self._run.digest] = str(self._status)
        self._noted()


class LineBoard(SweepBoard):
    """Prints one line per run that has ended, and from time to time one about those in progress."""

    def noted(self) -> None:
        if time.monotonic() - self._printed >= SILENCE:
            self._printed = time.monotonic()
            say(self._console, "\n  ".join([f"{self.head()}:", *self.in_progress()]))

    def ended(self, run: PlannedRun, score: float | None) -> None:
        super().ended(run, score)
        result = f"{run.config.metric} {score:.4f}" if score is not None else f"{run.status}: {run.error}"
        ended, expected = self._tally.count(*ENDED), self._tally.expected()
        left = f"  ({duration(self._tally.seconds_left())} left)" if ended < expected else ""
        say(self._console, f"{ended}/{expected}  {run}: {result}{left}")


class LiveBoard(SweepBoard):
    """Shows a table that is updated four times per second, and the runs in progress below it."""

    def __init__(self, console: Console, tally: Tally, keep: Callable[[], None] = lambda: None) -> None:
        super().__init__(console, tally, keep)
        self._stopping = Text()
        self._live = Live(get_renderable=self._render, console=console, refresh_per_second=4)

    def stopping(self, runs: int, *, time_is_up: bool = False) -> None:
        self._stopping = Text(being_saved(runs, time_is_up=time_is_up), style="bold yellow")
        self._live.refresh()

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Leave the last table on the screen, without runs in progress: none is running any more."""
        self._stopping = Text()
        self._tally.progress.clear()
        self._live.stop()

    def _render(self) -> Group:
        tally, every = self._tally, list(self._tally.runs.values())
        rows, several = [], len({run.task for run in every}) > 1
        for model, runs in grouped(every, lambda run: run.model).items():
            running = sum(run.digest in tally.progress for run in runs)
            counts = (f"{count(runs, 'done', 'diverged')}/{tally.expected(runs)}", running, count(runs, "failed"))
            best = ("-", "")
            if model in tally.best:
                score, run = tally.best[model]
                where = f", {run.task}" if several else ""
                best = (f"{score:.3f}", f"lr {run.config.train.lr:g}, D = {run.config.model.d_model}{where}")
            rows.append((model, *(f"{number or '-'}" for number in counts), *best))
        head = ("model", "done", "running", "failed", f"best {every[0].config.metric}", "with")
        summary = Grid.grid(padding=(0, 1))
        summary.add_row(ProgressBar(1.0, tally.share_done(), width=BAR), Text(self.head()))
        lines = Text("\n".join(["", *self.in_progress()]), no_wrap=True, overflow="ellipsis")
        return Group(TerminalTable(Table(head, rows)), lines, summary, self._stopping)
