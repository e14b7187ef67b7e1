"""What distinguishes one kind of training from another: its steps, its evaluations, and when it is over.

The lifecycle of a run (lifecycle.py) is the same for every workload. It calls the methods below in this order:

    build (the constructor), start, load or not, prepare, then until is_over: step and report, now and then save;
    at last finish
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch.optim import AdamW

from rebased.mixers import can_extend, check_state_size
from rebased.models import LanguageModel, LMConfig, shape_of
from rebased.runs.record import Record
from rebased.runs.run_config import RunConfig
from rebased.train.deferred_losses import DeferredLosses, SeenLoss
from rebased.train.oom import OUT_OF_MEMORY, half
from rebased.train.sinks import Sink, StepReport
from rebased.train.world import World

INIT, DROPOUT, ORDER = range(3)  # the streams of random numbers that a run's seed feeds

Answer = TypeVar("Answer")


class NotFinite(Exception):
    """A loss, a gradient or a weight is no longer a finite number."""

    def __init__(self, what: str, step: int, lr: float) -> None:
        super().__init__(what)
        self.what, self.step, self.lr = what, step, lr


@dataclass
class Progress:
    """Where a run stands, in plain numbers: all that a checkpoint holds besides tensors. Sums are taken since the last
    line of the record."""

    step: int = 0
    epoch: int = 0  # epochs that have ended
    batch: int = 0  # batches of the current epoch that were trained on
    loss: float = 0.0  # sum over labelled tokens, in nats
    labels: int = 0
    tokens: int = 0
    norms: list[float] = field(default_factory=list)  # of the gradient, one per step
    seconds: float = 0.0


class Output:
    """Where a run writes: its record and its sinks, in the process of rank 0 alone."""

    def __init__(self, record: Record, sinks: Sequence[Sink], world: World) -> None:
        self.record, self.sinks, self._is_rank_zero = record, sinks, world.is_rank_zero

    def line(self, line: dict[str, Any]) -> None:
        """Append a line to the record, then tell the sinks."""
        if self._is_rank_zero:
            self.record.append(line)
            for sink in self.sinks:
                sink.end(line) if line["type"] == "end" else sink.line(line)

    def step(self, report: StepReport) -> None:
        """Tell the sinks of a step."""
        for sink in self.sinks:
            sink.step(report)


class Workload(ABC):
    """A model in training. The constructor builds the model and checks the data; no file has been written by then.

    The class methods say of a config, without a model, how much memory and work its run needs. Work is counted in
    multiply-adds; training costs three forward passes.
    """

    remedy: ClassVar[str] = ""
    """What else to try when a run diverges, besides a lower learning rate."""

    config: RunConfig
    model: LanguageModel
    parameters: int  # their number in the whole model
    optimiser: AdamW  # with its moments, after `start`
    losses: DeferredLosses
    output: Output
    micro_batch: int | None  # sequences computed at once; None: all

    def __init__(self, config: RunConfig, world: World) -> None:
        self.config, self.world, self.progress = config, world, Progress()

    @classmethod
    def processes(cls, config: Any) -> int:
        """The number of processes that train this run together. Raises ValueError if they cannot."""
        return 1

    @classmethod
    @abstractmethod
    def memory(cls, config: Any, processes: int) -> int:
        """Bytes of main memory that a run on a CPU needs besides weights, gradients and moments, at least: the input of
        every block of one micro batch, and the data. Raises ValueError if the data alone do not fit."""

    @staticmethod
    def block_inputs(model: LMConfig, rows: int, seq_len: int) -> int:
        """Bytes of the inputs of all blocks, which the backward pass needs."""
        return 4 * rows * seq_len * model.d_model * (model.n_layers + 1)

    @classmethod
    def other_data(cls, config: Any, run: dict[str, Any]) -> str | None:
        """Why a run's data differ from the config's; None if they agree, or are not here. `run` is its record's first
        line."""
        return None

    @classmethod
    @abstractmethod
    def run_work(cls, config: Any) -> float:
        """The work of the whole run, evaluations included, if it does not stop early."""

    @classmethod
    @abstractmethod
    def step_work(cls, config: Any) -> float:
        """The work of one training step."""

    @classmethod
    @abstractmethod
    def recorded_work(cls, config: Any, lines: Sequence[dict[str, Any]]) -> tuple[float, float]:
        """(work, seconds) of what a record holds. Lines without their seconds are not counted."""

    @classmethod
    @abstractmethod
    def shorten(cls, config: Any, rows: int, lines: int, steps: int, share: float | None = None) -> RunConfig:
        """The config with `rows` sequences per step and so many lines in the record, each after so many steps.

        share: the share of a sequence that is enough on a CPU; a text can be cut to it. None: on a GPU.
        """

    @property
    @abstractmethod
    def steps(self) -> int:
        """Steps of the whole run, if it does not stop early."""

    def facts(self) -> dict[str, Any]:
        """What the record's first line says besides config, digest, code and machine."""
        return {}

    def where(self) -> dict[str, Any]:
        """What else is recorded of the conditions under which a run begins or is resumed."""
        return {}

    def check_record(self, lines: Sequence[dict[str, Any]]) -> None:  # noqa: B027, there may be nothing to check
        """Raise ValueError if the record so far shows that this run cannot be continued here."""

    @abstractmethod
    def must_have_saved(self, lines: Sequence[dict[str, Any]]) -> bool:
        """True if a run with these lines in its record has written a checkpoint."""

    def start(self, output: Output) -> None:
        """Move to the device. A checkpoint is loaded after that, if there is one."""
        self.output = output

    @abstractmethod
    def set_micro_batch(self, rows: int | None) -> None:
        """Compute so many sequences at once from here on."""

    def prepare(self) -> None:  # noqa: B027, the data may be there already
        """Make the data."""

    @abstractmethod
    def is_over(self) -> bool:
        """True if no step is left to be taken."""

    @abstractmethod
    def step(self) -> None:
        """Take one step and count it. The device may still be computing it afterwards."""

    @abstractmethod
    def report(self) -> None:
        """Write the lines that are due after the step just taken, evaluations included."""

    @abstractmethod
    def is_save_due(self, seconds: float) -> bool:
        """True if a checkpoint should be written now, so many seconds after the last one or the start."""

    def meets_others(self) -> bool:
        """True if all processes wait for one another at this step anyway."""
        return True

    def check_weights(self) -> None:  # noqa: B027, the norm of the gradient may have told
        """NotFinite where a weight is no number: such weights must not reach a checkpoint."""

    @abstractmethod
    def finish(self, folder: Path, measuring: Callable[[str, int, int], None]) -> dict[str, Any]:
        """Measure the trained model and write it. Returns what the record's last line says of it.

        measuring(split, done, total): called while it is measured.
        """

    @abstractmethod
    def result(self) -> dict[str, Any]:
        """What a RunResult says of the run so far: accuracy and epoch, or perplexity."""

    @abstractmethod
    def lr_of(self, step: int) -> float:
        """The learning rate of a step, counted from 1."""

    @abstractmethod
    def add_losses(self, first: int, seen: Sequence[SeenLoss]) -> None:
        """Add the outcomes of steps, of which the first is `first`, to the sums of `progress`. NotFinite where one of
        them is no number."""

    def flush(self) -> None:
        """Wait for the device and add up what it has computed."""
        first = self.progress.step - len(self.losses) + 1
        seen, seconds = self.losses.read()
        self.progress.seconds += seconds
        self.progress.tokens += sum(each.tokens for each in seen)
        self.add_losses(first, seen)

    def check_finite(self, step: int, seen: SeenLoss) -> None:
        """NotFinite where the loss of a step is no number."""
        if not math.isfinite(seen.values[0]):
            raise NotFinite(f"the loss became {seen.values[0]}", step, self.lr_of(step))

    def fit(self, work: Callable[[], Answer], rows: int) -> Answer:
        """What `work` returns. When the GPU's memory is too small, half as many sequences are computed at once from
        here on, the work is done again, and the record says so; the batch stays what it is.

        rows: sequences computed at once if `micro_batch` is None.
        """
        while True:
            try:
                return work()
            except torch.OutOfMemoryError:
                pass  # the error holds frames, and those hold tensors: leave it before going on
            if self.world.size > 1:
                raise ValueError(
                    f"the GPU's memory is too small for {self.micro_batch or rows} sequences at once; several "
                    "processes cannot change that under way: give a smaller --train.micro_batch and --resume"
                )
            self.set_micro_batch(half(self.micro_batch or rows))
            torch.cuda.empty_cache()  # cached blocks may be too small for what is allocated next
            self.output.line({"type": OUT_OF_MEMORY, "step": self.progress.step, "micro_batch": self.micro_batch})


def sequence_work(model: LMConfig, seq_len: int, labels: float) -> float:
    """Multiply-adds of a forward pass over one sequence, of which `labels` positions are labelled: per token the
    weights outside of the embeddings and the numbers in the mixers' states, per label the head."""
    weights, states = _numbers(model, seq_len)
    return seq_len * (weights + states) + labels * model.d_model * model.vocab_size


@cache
def _numbers(model: LMConfig, seq_len: int) -> tuple[int, int]:
    """The number of weights outside of the embeddings, and of numbers in the states after seq_len tokens."""
    shape = shape_of(model)
    tables = sum(table.weight.numel() for table in (shape.embedding, shape.positions) if table is not None)
    states = sum(check_state_size(block.mixer, seq_len) for block in shape.blocks if can_extend(block.mixer))
    return shape.num_parameters() - tables, states
