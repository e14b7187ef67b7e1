"""Training on a synthetic task: epochs over examples that were made in advance, an evaluation after each."""

import math
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from rebased.evaluate.accuracy import evaluate
from rebased.evaluate.norms import norm_statistics
from rebased.mixers import can_extend
from rebased.models import LanguageModel, LMConfig
from rebased.models.weights import save_model
from rebased.ops.backend import autocast
from rebased.runs.schedule import epoch_lr
from rebased.runs.synthetic_config import SyntheticRunConfig, longest, reported
from rebased.tasks import IGNORE, Batch, Examples, Questions, Segment, Task, epoch_batches, find_questions
from rebased.tasks.draws import mix_seed
from rebased.train.deferred_losses import DeferredLosses, SeenLoss
from rebased.train.optimiser import build_optimiser, make_moments, set_lr
from rebased.train.precision import autocast_dtype, choose_precision
from rebased.train.sinks import StepReport
from rebased.train.synthetic.step import CapturedStep, Step
from rebased.train.workload import DROPOUT, INIT, ORDER, NotFinite, Output, Progress, Workload, sequence_work
from rebased.train.world import World

LABELLED_ROWS = 256  # examples over which labels are averaged: their number can differ from row to row


class SyntheticWorkload(Workload):
    """One epoch after another, each followed by an evaluation on the test split."""

    config: SyntheticRunConfig
    train_set: tuple[Questions, ...]  # one per segment
    tests: dict[str, tuple[Examples, ...]]  # by split

    def __init__(self, config: SyntheticRunConfig, world: World) -> None:
        super().__init__(config, world)
        torch.manual_seed(mix_seed(config.train.seed, INIT))
        self.model = LanguageModel(config.model)  # on the CPU: the same weights everywhere
        torch.manual_seed(mix_seed(config.train.seed, DROPOUT))
        self.parameters = self.model.num_parameters()
        self.precision = choose_precision(config.train.precision, world.device)
        self.state_bytes = self._count_state_bytes()  # before there is a folder: a mixer's state_size may fail

    @classmethod
    def memory(cls, config: SyntheticRunConfig, processes: int) -> int:
        config.task.check_fits()  # first: where the examples alone are too many, the model is not to blame
        rows = config.train.micro_batch or config.train.batch_size
        rows = min(rows, max(segment.examples for segment in config.task.train))
        return config.task.data_bytes() + cls.block_inputs(config.model, rows, longest(config.task))

    @classmethod
    def run_work(cls, config: SyntheticRunConfig) -> float:
        return config.train.epochs * epoch_work(config)

    @classmethod
    def step_work(cls, config: SyntheticRunConfig) -> float:
        """The work of a step on the first segment."""
        return 3 * config.train.batch_size * task_work(config.model, config.task.task(config.task.train[0]))

    @classmethod
    def recorded_work(cls, config: SyntheticRunConfig, lines: Sequence[dict[str, Any]]) -> tuple[float, float]:
        epochs = [line for line in lines if {"seconds", "test_seconds"} <= line.keys()]
        seconds = [line["seconds"] + line["test_seconds"] for line in epochs]
        return len(seconds) * epoch_work(config), median(seconds) * len(seconds) if seconds else 0.0

    @classmethod
    def shorten(
        cls, config: SyntheticRunConfig, rows: int, lines: int, steps: int, share: float | None = None
    ) -> SyntheticRunConfig:
        tree, few = config.model_dump(), config.task.train[0].settings()
        tree["task"] |= {"train": [few | {"examples": steps * rows}], "test": [few | {"examples": 1}], "held_out": []}
        tree["train"] |= {"epochs": lines, "stop_above": 1.0, "give_up": None, "protocol": "paper"}
        tree["train"] |= {"checkpoint_seconds": 1e6, "batch_size": rows}
        return SyntheticRunConfig.model_validate(tree)

    @property
    def steps(self) -> int:
        return self.steps_per_epoch * self.config.train.epochs

    @property
    def steps_per_epoch(self) -> int:
        """Steps per epoch. A batch never spans two segments, so the last batch of each may be smaller."""
        batch = self.config.train.batch_size
        return sum(math.ceil(segment.examples / batch) for segment in self.config.task.train)

    @property
    def epochs(self) -> list[dict[str, Any]]:
        """The lines of the epochs that have ended."""
        return self.output.record.epochs

    def facts(self) -> dict[str, Any]:
        return {"state_bytes": self.state_bytes} if self.state_bytes else {}

    def _count_state_bytes(self) -> dict[str, int]:
        """The bytes of the model's state after the longest test sequence, in fp32, for readers without its mixers, by
        the length of that sequence. Empty if a mixer has no state."""
        if not all(can_extend(block.mixer) for block in self.model.blocks):
            return {}
        longest = max(segment.seq_len for segment in self.config.task.test)
        return {str(longest): 4 * self.model.state_size(longest)}

    def must_have_saved(self, lines: Sequence[dict[str, Any]]) -> bool:
        return sum(line["type"] == "epoch" for line in lines) > 1  # one may be written just before the first checkpoint

    def start(self, output: Output) -> None:
        super().start(output)
        config, device = self.config.train, self.world.device
        self.model.to(device)
        self.optimiser = build_optimiser(self.model, config, capturable=device.type == "cuda")
        make_moments(self.optimiser)
        self.losses = DeferredLosses(self.world, columns=2)
        self.set_micro_batch(config.micro_batch)

    def set_micro_batch(self, rows: int | None) -> None:
        self.micro_batch = rows
        config = self.config.train
        step = Step(self.model, self.optimiser, micro_batch=rows, precision=self.precision, compile=config.compile)
        captured = config.capture and self.world.device.type == "cuda"
        self.take: Callable[[Questions, Tensor], Tensor] = CapturedStep(step, self.world.device) if captured else step

    def prepare(self) -> None:
        data = self.config.task.build(self.config.train.seed, self.world.device)
        self.train_set = tuple(find_questions(examples) for examples in data.train)
        self.tests = {"test": data.test, "held_out": data.held_out}
        self.begin_epoch()

    def begin_epoch(self) -> None:
        """Set the learning rate of the epoch and the order of its batches. The order is a function of the seed and the
        epoch, so a checkpoint need not hold it."""
        config, epoch = self.config.train, self.progress.epoch
        set_lr(self.optimiser, epoch_lr(config.lr, epoch, config.epochs))
        self.model.train()
        sizes = [segment.examples for segment in self.config.task.train]
        batches = epoch_batches(sizes, config.batch_size, mix_seed(config.seed, ORDER), epoch)
        rows = torch.cat([batch.rows for batch in batches]).to(self.world.device)  # one copy per epoch
        parts = rows.split([len(batch.rows) for batch in batches])
        self.batches = [Batch(batch.segment, part) for batch, part in zip(batches, parts, strict=True)]

    def is_over(self) -> bool:
        epochs, config = self.epochs, self.config.train
        if self.progress.batch or not epochs:
            return False
        is_solved = epochs[-1]["test"]["accuracy"] > config.stop_above
        return len(epochs) == config.epochs or is_solved or self.gives_up()

    def gives_up(self) -> bool:
        """True if the config's rule for runs that do not learn ends this one before its last epoch."""
        epochs, rule = self.epochs, self.config.train.give_up
        if rule is None or not rule.after_epoch <= len(epochs) < self.config.train.epochs:
            return False
        return max(line["test"]["accuracy"] for line in epochs) < rule.below

    def step(self) -> None:
        batch = self.batches[self.progress.batch]
        questions = self.train_set[batch.segment]
        outcome = self.fit(lambda: self.take(questions, batch.rows), self.config.train.batch_size)
        self.losses.add(outcome, tokens=len(batch.rows) * questions.inputs.shape[1])
        self.progress.step += 1
        self.progress.batch += 1

    def report(self) -> None:
        if self.losses.is_due:
            self.flush()
        if self.progress.batch == len(self.batches):
            self.end_epoch()

    def lr_of(self, step: int) -> float:
        config = self.config.train
        return epoch_lr(config.lr, (step - 1) // self.steps_per_epoch, config.epochs)

    def add_losses(self, first: int, seen: Sequence[SeenLoss]) -> None:
        progress = self.progress
        for step, each in enumerate(seen, start=first):
            self.check_finite(step, each)
            loss, labels = each.values
            progress.loss += loss * int(labels)
            progress.labels += int(labels)
            speed = progress.tokens / progress.seconds
            self.output.step(StepReport(step, progress.epoch + 1, loss, self.lr_of(step), speed))

    def check_weights(self) -> None:
        """A last step may have a finite loss and an infinite gradient."""
        if not torch.stack([parameter.isfinite().all() for parameter in self.model.parameters()]).all():
            step = self.progress.step
            raise NotFinite("a weight became infinite or not a number", step, self.lr_of(step))

    def end_epoch(self) -> None:
        """Evaluate and record. The lifecycle then saves: what a checkpoint says has ended stands in the record."""
        self.flush()
        self.check_weights()
        progress, started = self.progress, time.perf_counter()
        line: dict[str, Any] = {
            "type": "epoch",
            "epoch": progress.epoch + 1,
            "step": progress.step,
            "lr": self.lr_of(progress.step),
            "loss": progress.loss / progress.labels,
        }
        for split, examples in self.tests.items():
            if examples:
                line[split] = self.test(getattr(self.config.task, split), examples)
        if norms := norm_statistics(self.model):
            line["norms"] = norms
        line["seconds"] = progress.seconds
        line["test_seconds"] = time.perf_counter() - started
        line["tokens_per_second"] = progress.tokens / progress.seconds
        self.output.line(line)
        self.progress = Progress(epoch=progress.epoch + 1, step=progress.step)
        if not self.is_over():
            self.begin_epoch()

    def test(self, segments: Sequence[Segment], examples: Sequence[Examples]) -> dict[str, Any]:
        """The accuracies on a split, as the record holds them."""
        batch = self.config.train.batch_size
        with autocast(autocast_dtype(self.precision), self.world.device):
            return self.fit(lambda: evaluate(self.model, segments, examples, self.micro_batch or batch), batch)

    def is_save_due(self, seconds: float) -> bool:
        """After each epoch, and within one when checkpoint_seconds have passed."""
        if self.progress.batch == 0:
            return self.progress.step > 0
        return seconds > self.config.train.checkpoint_seconds

    def finish(self, folder: Path, measuring: Callable[[str, int, int], None]) -> dict[str, Any]:
        save_model(self.model, folder)
        return self.result() | ({"gave_up": True} if self.gives_up() else {})

    def result(self) -> dict[str, Any]:
        epochs = self.epochs
        accuracy, epoch = reported(epochs, self.config.train.protocol) if epochs else (None, None)
        return {"accuracy": accuracy, "epoch": epoch}


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
