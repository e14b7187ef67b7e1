"""How one run looks, whatever is trained: a bar in a terminal, lines in a log."""

from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from rebased.cli.output import say
from rebased.config import plural
from rebased.train import RunStart, Sink, StepReport
from rebased.train.oom import OUT_OF_MEMORY


def being_saved(runs: int, *, time_is_up: bool = False) -> str:
    """The message after Ctrl-C, or when the time is up, while `runs` runs are being saved, which can take seconds."""
    why, again = ("time is up", "Ctrl-C") if time_is_up else ("stopping", "Ctrl-C again")
    return f"{why}: saving {plural(runs, 'run')}; {again} ends at once, without saving"


class ProgressSink(Sink):
    """A sink that is closed in the end, however the run ends."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def stopping(self) -> None:
        say(self._console, being_saved(1))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None: ...


def progress_sink(console: Console | None = None) -> ProgressSink:
    """A bar where the console is a terminal, else lines. Default: the console of stdout."""
    console = console or Console()
    return Bar(console) if console.is_terminal else Lines(console)


def headline(run: RunStart) -> str:
    """What is trained, in one line."""
    config = run.config
    processes = f" in {run.processes} processes" if run.processes > 1 else ""
    steps = f"{plural(run.steps, 'step')}{config.step_size()}"
    return f"{run.parameters:,} parameters on {run.device}{processes}, {steps}, from step {run.step:,}"


class Status:
    """The latest numbers of a run, in words. Kept by those who show it."""

    def __init__(self) -> None:
        self.epochs: int | None = None
        self.epoch: int | None = None
        self._loss = self._score = ""

    def start(self, run: RunStart) -> None:
        """Begin with what the record says already."""
        self.epochs = getattr(run.config.train, "epochs", None)
        for line in run.lines:
            self.line(line)
        if self.epochs:
            self.epoch = 1 + sum(line["type"] == "epoch" for line in run.lines)

    def step(self, report: StepReport) -> None:
        """A step whose loss is not known yet changes nothing."""
        self.epoch = report.epoch
        if report.loss is not None:
            self._loss = f"loss {report.loss:.3f}  {report.tokens_per_second:,.0f} tokens/s"

    def line(self, line: dict[str, Any]) -> None:
        """A line of the record."""
        if line["type"] == "epoch":
            self._score = f"accuracy {line['test']['accuracy']:.3f}"
        elif line["type"] == "step":
            mfu = "" if line["mfu"] is None else f"  MFU {line['mfu']:.1%}"
            speed = f"{line['tokens_per_second']:,.0f} tokens/s{mfu}"
            self._loss = f"loss {line['loss']:.3f}  |g| {line['grad_norm']:.2f}  {speed}"
        elif line["type"] == "eval":
            self._score = f"valid ppl {line['perplexity']:.2f}"

    def __str__(self) -> str:
        epoch = f"epoch {self.epoch}/{self.epochs}" if self.epochs else ""
        return "  ".join(filter(None, (epoch, self._loss or "starting", self._score)))


class Bar(ProgressSink):
    """One bar over the steps; after them one per split that is measured."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._progress = Progress(
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[what]}", markup=False),
            TimeRemainingColumn(compact=True),
            console=console,
        )
        self._status = Status()
        self._splits: dict[str, TaskID] = {}

    def start(self, run: RunStart) -> None:
        say(self._console, headline(run))
        self._status.start(run)
        self._task = self._progress.add_task("train", total=run.steps, completed=run.step, what=str(self._status))
        self._progress.start()

    def step(self, report: StepReport) -> None:
        self._status.step(report)
        self._progress.update(self._task, completed=report.step, what=str(self._status))

    def line(self, line: dict[str, Any]) -> None:
        self._status.line(line)
        self._progress.update(self._task, what=str(self._status))

    def measuring(self, split: str, done: int, total: int) -> None:
        if split not in self._splits:  # a bar of its own: that of training stays, with its last loss
            self._splits[split] = self._progress.add_task("measure", total=total, what=f"windows of {split} measured")
        self._progress.update(self._splits[split], completed=done)

    def __exit__(self, *error: object) -> None:
        self._progress.stop()


class Lines(ProgressSink):
    """One line per epoch, or one every few steps."""

    def start(self, run: RunStart) -> None:
        self._steps, self._epochs = run.steps, getattr(run.config.train, "epochs", None)
        say(self._console, headline(run))

    def line(self, line: dict[str, Any]) -> None:
        where, text = f"step {line.get('step')}/{self._steps}", None
        if line["type"] == "epoch":
            text = (
                f"epoch {line['epoch']}/{self._epochs}  step {line['step']}  loss {line['loss']:.4f}  "
                f"accuracy {line['test']['accuracy']:.4f}  lr {line['lr']:.2e}  "
                f"{line['tokens_per_second']:,.0f} tokens/s  {line['seconds'] + line['test_seconds']:.1f} s"
            )
        elif line["type"] == "step":
            mfu = "" if line["mfu"] is None else f"  MFU {line['mfu']:.1%}"
            left = (self._steps - line["step"]) * line["tokens"] / line["step"] / line["tokens_per_second"]
            text = (
                f"{where}  loss {line['loss']:.4f}  |g| {line['grad_norm']:.3f}  lr {line['lr']:.2e}  "
                f"{line['tokens_per_second']:,.0f} tokens/s{mfu}  {left:,.0f} s left"
            )
        elif line["type"] == "eval":
            text = (
                f"{where}  valid loss {line['loss']:.4f}  perplexity {line['perplexity']:.3f}  "
                f"({line['valid_tokens']:,} tokens in {line['seconds']:.1f} s)"
            )
        elif line["type"] == OUT_OF_MEMORY:
            rows = plural(line["micro_batch"], "sequence")
            text = f"{where}  out of GPU memory: {rows} at once from here on, the same batch"
        if text:
            say(self._console, text)

    def measuring(self, split: str, done: int, total: int) -> None:
        if done == 0:
            say(self._console, f"measuring {plural(total, 'window')} of {split}")
