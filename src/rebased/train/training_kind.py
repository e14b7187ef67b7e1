"""What training adds to a kind of run: its workload, and how much memory, work and time such a run needs."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cache
from typing import Any

from rebased.mixers import can_extend, check_state_size
from rebased.models import LMConfig, shape_of
from rebased.runs.run_config import RunConfig
from rebased.train.workload import Workload
from rebased.train.world import World


class TrainingKind(ABC):
    """How runs of one kind are trained. `config` is of the kind's class everywhere.

    Work is counted in multiply-adds. Training costs three forward passes.
    """

    @abstractmethod
    def workload(self, config: Any, world: World) -> Workload:
        """The workload of a run."""

    def processes(self, config: Any) -> int:
        """The number of processes that train this run together. Raises ValueError if they cannot."""
        return 1

    @abstractmethod
    def memory(self, config: Any, processes: int) -> int:
        """Bytes of main memory that a run on a CPU needs besides weights, gradients and moments, at least: the input of
        every block of one micro batch, and the data. Raises ValueError if the data alone do not fit."""

    def other_data(self, config: Any, run: dict[str, Any]) -> str | None:
        """Why a run's data differ from the config's; None if they agree, or are not here. `run` is its record's first
        line."""
        return None

    @abstractmethod
    def run_work(self, config: Any) -> float:
        """The work of the whole run, evaluations included, if it does not stop early."""

    @abstractmethod
    def step_work(self, config: Any) -> float:
        """The work of one training step."""

    @abstractmethod
    def recorded_work(self, config: Any, lines: Sequence[dict[str, Any]]) -> tuple[float, float]:
        """(work, seconds) of what a record holds. Lines without their seconds are not counted."""

    @abstractmethod
    def shorten(self, config: Any, rows: int, lines: int, steps: int, share: float | None = None) -> RunConfig:
        """The config with `rows` sequences per step and so many lines in the record, each after so many steps.

        share: the share of a sequence that is enough on a CPU; a text can be cut to it. None: on a GPU.
        """


def block_inputs(model: LMConfig, rows: int, seq_len: int) -> int:
    """Bytes of the inputs of all blocks, which the backward pass needs."""
    return 4 * rows * seq_len * model.d_model * (model.n_layers + 1)


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
