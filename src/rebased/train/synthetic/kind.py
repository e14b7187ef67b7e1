"""What the trainer must know of runs on a synthetic task, besides their workload."""

from collections.abc import Sequence
from functools import cache
from statistics import median
from typing import Any

from rebased.models import LMConfig
from rebased.runs.synthetic_config import SyntheticRunConfig, longest
from rebased.tasks import IGNORE, Task
from rebased.train.synthetic.workload import SyntheticWorkload
from rebased.train.training_kind import TrainingKind, block_inputs, sequence_work
from rebased.train.world import World

LABELLED_ROWS = 256  # examples over which labels are averaged: their number can differ from row to row


class SyntheticTraining(TrainingKind):
    """Runs on a synthetic task."""

    def workload(self, config: SyntheticRunConfig, world: World) -> SyntheticWorkload:
        return SyntheticWorkload(config, world)

    def memory(self, config: SyntheticRunConfig, processes: int) -> int:
        config.task.check_fits()  # first: where the examples alone are too many, the model is not to blame
        rows = config.train.micro_batch or config.train.batch_size
        rows = min(rows, max(segment.examples for segment in config.task.train))
        return config.task.data_bytes() + block_inputs(config.model, rows, longest(config.task))

    def run_work(self, config: SyntheticRunConfig) -> float:
        return config.train.epochs * epoch_work(config)

    def step_work(self, config: SyntheticRunConfig) -> float:
        """The work of a step on the first segment."""
        return 3 * config.train.batch_size * task_work(config.model, config.task.task(config.task.train[0]))

    def recorded_work(self, config: SyntheticRunConfig, lines: Sequence[dict[str, Any]]) -> tuple[float, float]:
        epochs = [line for line in lines if {"seconds", "test_seconds"} <= line.keys()]
        seconds = [line["seconds"] + line["test_seconds"] for line in epochs]
        return len(seconds) * epoch_work(config), median(seconds) * len(seconds) if seconds else 0.0

    def shorten(
        self, config: SyntheticRunConfig, rows: int, lines: int, steps: int, share: float | None = None
    ) -> SyntheticRunConfig:
        tree, few = config.model_dump(), config.task.train[0].settings()
        tree["task"] |= {"train": [few | {"examples": steps * rows}], "test": [few | {"examples": 1}], "held_out": []}
        tree["train"] |= {"epochs": lines, "stop_above": 1.0, "give_up": None, "protocol": "paper"}
        tree["train"] |= {"checkpoint_seconds": 1e6, "batch_size": rows}
        return SyntheticRunConfig.model_validate(tree)


def task_work(model: LMConfig, task: Task) -> float:
    """Multiply-adds of a forward pass over one sequence of a task."""
    return sequence_work(model, task.seq_len, _labels_per_row(type(task), task.model_dump_json()))


def epoch_work(config: SyntheticRunConfig) -> float:
    """Multiply-adds of an epoch: training, test and held-out evaluation."""
    task, model = config.task, config.model
    training, testing = (
        sum(segment.examples * task_work(model, task.task(segment)) for segment in segments)
        for segments in (task.train, (*task.test, *task.held_out))
    )
    return 3 * training + testing


@cache
def _labels_per_row(cls: type[Task], settings: str) -> float:
    """The mean number of labelled positions per example of the task with these settings (JSON)."""
    labels = cls.model_validate_json(settings).build(LABELLED_ROWS, seed=0).labels
    return int((labels != IGNORE).sum()) / LABELLED_ROWS
