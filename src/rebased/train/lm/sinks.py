"""Where a language model's run tells how it fares. A sink is never a source: nothing is read back."""

from typing import Any, NamedTuple

from rebased.runs.lm_config import TextRunConfig


class TextStart(NamedTuple):
    config: TextRunConfig
    parameters: int
    device: str
    processes: int
    step: int  # steps done already, where the run is resumed
    perplexity: float | None  # of the last evaluation before that


class TextSink:
    """Listens to a run, in its first process alone. Override what is of interest."""

    def start(self, run: TextStart) -> None: ...

    def step(self, step: int) -> None:
        """A step has been handed to the device; what came of it is not known yet."""

    def report(self, line: dict[str, Any]) -> None:
        """The line of type "step" that has just been written to record.jsonl: the mean of the last few steps."""

    def evaluation(self, line: dict[str, Any]) -> None:
        """The line of type "eval" that has just been written."""

    def saved(self, step: int) -> None: ...

    def measuring(self, split: str, done: int, total: int) -> None:
        """After the last step: so many of this process's windows of a split are measured, none at first."""

    def stopping(self) -> None:
        """Ctrl-C or SIGTERM has come, and the run is about to be saved, which may take a while."""

    def end(self, line: dict[str, Any]) -> None:
        """The last line of record.jsonl. An interrupted run has none."""
