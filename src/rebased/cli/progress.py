"""How a run looks in a terminal (one bar) and in a log (one line an epoch)."""

from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from rebased.cli.interruption import being_saved
from rebased.train import RunStart, Sink, StepReport


class ProgressSink(Sink, AbstractContextManager["ProgressSink"]):
    """A sink that is closed in the end, however the run ends."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def __enter__(self) -> Self:
        return self


def progress_sink(console: Console) -> ProgressSink:
    return Bar(console) if console.is_terminal else Lines(console)


class Bar(ProgressSink):
    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("epoch {task.fields[epoch]}/{task.fields[epochs]}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}  accuracy {task.fields[accuracy]}  {task.fields[speed]} tokens/s"),
            TimeRemainingColumn(),
            console=console,
        )

    def start(self, run: RunStart) -> None:
        accuracy = f"{run.epochs[-1]['test']['accuracy']:.3f}" if run.epochs else "-"
        self._task = self._progress.add_task(
            "train",
            total=run.steps,
            completed=run.step,
            epoch=len(run.epochs) + 1,
            epochs=run.config.train.epochs,
            loss="-",
            accuracy=accuracy,
            speed="-",
        )
        self._progress.start()

    def step(self, report: StepReport) -> None:
        self._progress.update(
            self._task,
            completed=report.step,
            epoch=report.epoch,
            loss=f"{report.loss:.3f}",
            speed=f"{report.tokens_per_second:,.0f}",
        )

    def epoch(self, line: dict[str, Any]) -> None:
        self._progress.update(self._task, accuracy=f"{line['test']['accuracy']:.3f}")

    def stopping(self) -> None:
        self._progress.console.print(being_saved(1), soft_wrap=True, highlight=False, markup=False)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()


class Lines(ProgressSink):
    def __init__(self, console: Console) -> None:
        self._console = console

    def start(self, run: RunStart) -> None:
        self._epochs = run.config.train.epochs
        self._say(f"{run.parameters:,} parameters on {run.device}, {run.steps} steps, from step {run.step}")

    def epoch(self, line: dict[str, Any]) -> None:
        self._say(
            f"epoch {line['epoch']}/{self._epochs}  step {line['step']}  loss {line['loss']:.4f}  "
            f"accuracy {line['test']['accuracy']:.4f}  lr {line['lr']:.2e}  "
            f"{line['tokens_per_second']:,.0f} tokens/s  {line['seconds'] + line['test_seconds']:.1f} s"
        )

    def stopping(self) -> None:
        self._say(being_saved(1))

    def _say(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, highlight=False, markup=False)
