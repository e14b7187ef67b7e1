"""Progress of several runs at once: one bar per run in a terminal, one line per run and epoch in a log."""

from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from rebased.cli.interruption import being_saved
from rebased.cli.progress import Status
from rebased.train import RunStart, Sink, StepReport


class Board:
    """Shows the progress of runs between `with` and its end. Each run gets its own sink."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[what]}", markup=False),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )

    def sink(self, name: str, epochs: int) -> Sink:
        """Return the sink of one run. In a terminal its bar appears at once and says "waiting"."""
        task = self._progress.add_task(name, total=None, start=False, what="waiting")
        return _Bar(self._progress, task) if self._console.is_terminal else _Lines(self._console, name, epochs)

    def stopping(self, runs: int) -> None:
        """Say that so many runs are being saved after Ctrl-C."""
        self._console.print(being_saved(runs), soft_wrap=True, highlight=False, markup=False)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()


class _Bar(Sink):
    """The bar of one run."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress, self._task, self._status = progress, task, Status()

    def start(self, run: RunStart) -> None:
        self._status.start(run)
        self._progress.start_task(self._task)
        self._progress.update(self._task, total=run.steps, completed=run.step, what="starting")

    def step(self, report: StepReport) -> None:
        self._status.step(report)
        self._progress.update(self._task, completed=report.step, what=str(self._status))

    def line(self, line: dict[str, Any]) -> None:
        self._status.line(line)

    def end(self, line: dict[str, Any]) -> None:
        what = f"done: best accuracy {line['accuracy']:.3f}" if line["status"] == "done" else line["status"]
        self._progress.update(self._task, total=line["step"], completed=line["step"], what=what)


class _Lines(Sink):
    """One line per epoch of one run, for logs."""

    def __init__(self, console: Console, name: str, epochs: int) -> None:
        self._console, self._name, self._epochs = console, name, epochs

    def line(self, line: dict[str, Any]) -> None:
        if line["type"] != "epoch":
            return
        text = (
            f"{self._name:<22}  epoch {line['epoch']:>2}/{self._epochs}  loss {line['loss']:.3f}  "
            f"accuracy {line['test']['accuracy']:.3f}  {line['seconds'] + line['test_seconds']:.1f} s"
        )
        self._console.print(text, soft_wrap=True, highlight=False, markup=False)
