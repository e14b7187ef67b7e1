"""Where a run reports its progress: bars, log lines, dashboards. A sink is never a source: nothing is read back."""

from typing import Any, NamedTuple

from rebased.runs.run_config import RunConfig


class RunStart(NamedTuple):
    """What is known when training begins."""

    config: RunConfig
    parameters: int
    device: str
    processes: int
    step: int  # steps done already, where the run is resumed
    steps: int  # steps of the whole run, if it does not stop early
    lines: list[dict[str, Any]]  # the record so far


class StepReport(NamedTuple):
    """One step. What came of it is None while the device still computes it."""

    step: int
    epoch: int | None = None  # counted from 1; None where a run has no epochs
    loss: float | None = None  # mean over the labelled tokens of this step
    lr: float | None = None
    tokens_per_second: float | None = None  # since the last line of the record


class Sink:
    """Listens to a run, in the process of rank 0 alone. Override what is of interest.

    The events are plain data, so that a sink may live in another process than the run.
    """

    def start(self, run: RunStart) -> None:
        """Training begins, or continues from a checkpoint."""

    def step(self, report: StepReport) -> None:
        """A step was taken."""

    def line(self, line: dict[str, Any]) -> None:
        """This line was appended to record.jsonl. Its "type" is "epoch", "step", "eval" or "out_of_memory"."""

    def saved(self, step: int) -> None:
        """A checkpoint of this step was written."""

    def measuring(self, split: str, done: int, total: int) -> None:
        """After the last step: `done` of `total` windows of a split are measured, 0 at first."""

    def stopping(self) -> None:
        """Ctrl-C or SIGTERM has come, and the run is about to be saved, which may take a while."""

    def end(self, line: dict[str, Any]) -> None:
        """The last line of record.jsonl. An interrupted run has none."""
