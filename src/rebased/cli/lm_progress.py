"""How a language model's run looks in a terminal (one bar) and in a log (a line every few steps)."""

from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from rebased.cli.interruption import being_saved
from rebased.train.lm import TextSink, TextStart


class TextProgress(TextSink):
    """A sink that is closed in the end, however the run ends."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def text_progress(console: Console) -> TextProgress:
    return Bar(console) if console.is_terminal else Lines(console)


def headline(run: TextStart) -> str:
    processes = f" in {run.processes} processes" if run.processes > 1 else ""
    data, train = run.config.data, run.config.train
    return (
        f"{run.parameters:,} parameters on {run.device}{processes}, {train.steps:,} steps of "
        f"{train.batch_size:,} x {data.seq_len:,} tokens, from step {run.step:,}"
    )


class Bar(TextProgress):
    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[what]}"),
            TimeRemainingColumn(compact=True),
            console=console,
        )
        self._loss, self._perplexity = "starting", ""
        self._splits: dict[str, TaskID] = {}

    def start(self, run: TextStart) -> None:
        self._console.print(headline(run), highlight=False, markup=False)
        if run.perplexity is not None:
            self._perplexity = f"valid ppl {run.perplexity:.2f}"
        self._task = self._progress.add_task("train", total=run.config.train.steps, completed=run.step, what="starting")
        self._progress.start()

    def step(self, step: int) -> None:
        self._progress.update(self._task, completed=step)

    def report(self, line: dict[str, Any]) -> None:
        mfu = "" if line["mfu"] is None else f"  MFU {line['mfu']:.1%}"
        self._loss = (
            f"loss {line['loss']:.3f}  |g| {line['grad_norm']:.2f}  {line['tokens_per_second']:,.0f} tok/s{mfu}"
        )
        self._show()

    def evaluation(self, line: dict[str, Any]) -> None:
        self._perplexity = f"valid ppl {line['perplexity']:.2f}"
        self._show()

    def measuring(self, split: str, done: int, total: int) -> None:
        if split not in self._splits:  # a bar of its own: that of training stays, with its last loss
            self._splits[split] = self._progress.add_task("measure", total=total, what=f"windows of {split} measured")
        self._progress.update(self._splits[split], completed=done)

    def stopping(self) -> None:
        self._console.print(being_saved(1), soft_wrap=True, highlight=False, markup=False)

    def _show(self) -> None:
        self._progress.update(self._task, what="  ".join(filter(None, (self._loss, self._perplexity))))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()


class Lines(TextProgress):
    def __init__(self, console: Console) -> None:
        self._console = console

    def start(self, run: TextStart) -> None:
        self._steps, self._left = run.config.train.steps, ""
        self._say(headline(run))

    def report(self, line: dict[str, Any]) -> None:
        mfu = "" if line["mfu"] is None else f"  MFU {line['mfu']:.1%}"
        left = (self._steps - line["step"]) * line["tokens"] / line["step"] / line["tokens_per_second"]
        self._say(
            f"step {line['step']}/{self._steps}  loss {line['loss']:.4f}  |g| {line['grad_norm']:.3f}  "
            f"lr {line['lr']:.2e}  {line['tokens_per_second']:,.0f} tokens/s{mfu}  {left:,.0f} s left"
        )

    def evaluation(self, line: dict[str, Any]) -> None:
        self._say(
            f"step {line['step']}/{self._steps}  valid loss {line['loss']:.4f}  perplexity {line['perplexity']:.3f}  "
            f"({line['valid_tokens']:,} tokens in {line['seconds']:.1f} s)"
        )

    def measuring(self, split: str, done: int, total: int) -> None:
        if done == 0:
            self._say(f"measuring {total:,} windows of {split}")

    def stopping(self) -> None:
        self._say(being_saved(1))

    def _say(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, highlight=False, markup=False)
