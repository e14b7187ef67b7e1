"""Where a run tells how it fares: bars, log lines, dashboards. A sink is never a source: nothing is read back."""

from typing import Any, NamedTuple

from rebased.runs.synthetic_config import RunConfig


class RunStart(NamedTuple):
    config: RunConfig
    parameters: int
    device: str
    step: int  # steps done already, where the run is resumed
    steps: int  # steps of the whole run, if it does not stop early
    epochs: list[dict[str, Any]]  # the records of the epochs done already


class StepReport(NamedTuple):
    step: int
    epoch: int  # counted from 1
    loss: float  # mean over the labelled tokens of this step
    lr: float
    tokens_per_second: float  # of this epoch so far


class Sink:
    """Listens to a run. Override what is of interest; a sink of one's own (TensorBoard, W&B) is a few lines."""

    def start(self, run: RunStart) -> None: ...

    def step(self, report: StepReport) -> None: ...

    def epoch(self, line: dict[str, Any]) -> None:
        """The line that has just been written to record.jsonl."""

    def stopping(self) -> None:
        """Ctrl-C or SIGTERM has come, and the run is about to be saved, which may take a while."""

    def end(self, line: dict[str, Any]) -> None:
        """The last line of record.jsonl. An interrupted run has none."""
