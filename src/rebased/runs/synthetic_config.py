"""The config of a run on a synthetic task: the task, the model, and how it is trained."""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal, NamedTuple

from pydantic import (
    Field,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    field_serializer,
    field_validator,
    model_validator,
)

from rebased.config import Config
from rebased.models import LMConfig
from rebased.runs.run_config import DECAY, Betas, Compile, Decay, Device, Precision, RunConfig, finish_model
from rebased.tasks import AnyTask, TaskData, task_class

Protocol = Literal["paper", "held_out"]
"""Both choose the epoch with the best accuracy on the test split. `paper` reports that accuracy, although it was used
for the choice. `held_out` reports the accuracy of the same epoch on the held-out split, which was not."""


class Reported(NamedTuple):
    """The result of a run, and the epoch it was reached in."""

    accuracy: float
    epoch: int


def reported(epochs: Sequence[dict[str, Any]], protocol: Protocol) -> Reported:
    """The result of a run, from the lines of its epochs. The first of equally good epochs is chosen."""
    if not epochs:
        raise ValueError("there is no result before the first epoch has ended")
    best = max(epochs, key=lambda line: line["test"]["accuracy"])
    split = "test" if protocol == "paper" else "held_out"
    if split not in best:
        raise ValueError("this record has no held-out accuracy: the run was trained without task.held_out")
    return Reported(best[split]["accuracy"], best["epoch"])


class GiveUp(Config):
    """When a run that does not learn ends early: a rule that is part of the run, stated before it begins."""

    below: float = Field(gt=0, lt=1, description="the best test accuracy so far is below this ...")
    after_epoch: int = Field(ge=1, description="... after this many epochs, or later")


class SyntheticTrainConfig(Config):
    """How a model is trained on a synthetic task. Defaults are the paper's settings."""

    added_later: ClassVar[tuple[str, ...]] = ("give_up", "decay")

    protocol: Protocol = Field(
        "paper", description="what a run's accuracy is: the best epoch on test, or that epoch on held_out"
    )
    seed: int = Field(42, ge=0, description="of the initial weights, dropout and the order of examples")
    epochs: int = Field(64, ge=1, description="passes over the examples")
    batch_size: int = Field(512, ge=1, description="sequences per step, however many are computed at once")
    micro_batch: int | None = Field(None, ge=1, description="sequences computed at once; none: the whole batch")
    lr: float = Field(1e-3, gt=0, le=1e30, allow_inf_nan=False, description="of the first epoch; a cosine leads to 0")
    weight_decay: float = Field(0.1, ge=0, le=1e6, allow_inf_nan=False, description="of AdamW; `decay` says of what")
    decay: Decay = Field("all", description=f"{DECAY}; all: as in the paper")
    betas: Betas = Field((0.9, 0.999), description="of AdamW")
    eps: float = Field(1e-8, gt=0, le=1e6, allow_inf_nan=False, description="of AdamW")
    stop_above: float = Field(0.99, ge=0, le=1, description="end early above this test accuracy; 1: never")
    give_up: GiveUp | None = Field(
        None, description="end early if the best test accuracy is below a mark after some epochs; none: never"
    )
    device: Device = Field("auto", description="auto: a GPU if there is one")
    precision: Precision = Field("fp32", description="of matrix products; weights are always fp32")
    capture: bool = Field(True, description="on a GPU, replay the step as a CUDA graph")
    compile: Compile = Field("none", description="what torch.compile compiles: a minute more before the first step")
    checkpoint_seconds: float = Field(60.0, gt=0, description="save within an epoch when this long has passed")

    @field_serializer("compile")
    def _as_digests_know_it(self, compile: str) -> bool | str:
        """The value as a flag (False, True) where it was one when the digests of known runs were computed."""
        return {"none": False, "model": True}.get(compile, compile)


class SuitePart(Config):
    """Where a run stands in a suite (suite.py), and which split chose what."""

    name: str = Field(description="the suite")
    protocol: str = Field(description="the digest of its protocol; only runs with the same one are compared")
    task: str = Field(description="the task's name in the suite")
    mixer: str = Field(description="the name of the compared mixer")
    state_bytes: int | None = Field(description="largest state of the compared layer, in bytes; none: no limit")
    choosing_seeds: tuple[int, ...] = Field(description="seeds whose runs choose the rate and are not scored")
    rate_chosen_on: Literal["test"] = Field("test", description="the split that chooses the rate and the epoch")
    scored_on: Literal["held_out"] = Field("held_out", description="the split that scores, once")


class SyntheticRunConfig(RunConfig):
    """A run on a synthetic task. Its execution settings are part of its digest."""

    section, metric, has_epochs, verb = "task", "accuracy", True, "train"
    added_later: ClassVar[tuple[str, ...]] = ("suite",)

    execution: ClassVar[tuple[str, ...]] = (
        "train.device",
        "train.micro_batch",
        "train.capture",
        "train.compile",
        "train.checkpoint_seconds",
    )

    task: AnyTask
    model: LMConfig
    train: SyntheticTrainConfig = SyntheticTrainConfig()
    suite: SuitePart | None = Field(None, description="filled in by `rebased suite`")

    @field_validator("model", mode="wrap")
    @classmethod
    def _finish_model(cls, value: Any, build: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Any:
        if "task" not in info.data:  # the task is invalid: only that error is shown
            return LMConfig()
        task = info.data["task"]
        needed = {"vocab_size": task.vocab_size, "max_len": longest(task), "readout": task.task_type.readout}
        return finish_model(value, build, needed)

    @model_validator(mode="after")
    def _fits(self) -> "SyntheticRunConfig":
        if self.model.vocab_size < self.task.vocab_size:
            raise ValueError(
                f"model.vocab_size {self.model.vocab_size} is below the task's {self.task.vocab_size}; "
                "leave it out to take the task's"
            )
        if self.model.readout != (needed := self.task.task_type.readout):
            raise ValueError(
                f"model.readout is {self.model.readout!r}; task {self.task.name!r} needs {needed!r}: leave it out"
            )
        limit = self.model.length_limit
        if limit is not None and limit < longest(self.task):
            raise ValueError(
                f"model.max_len {self.model.max_len} is below the task's longest sequence, {longest(self.task)}; "
                "leave it out to take the task's"
            )
        if self.train.protocol == "held_out" and not self.task.held_out:
            segment = ", ".join(f"{key}: {value}" for key, value in self.task.test[0])
            raise ValueError(
                "train.protocol held_out reports on the held-out split, but task.held_out is empty; give it segments, "
                f"such as [{{{segment}}}]"
            )
        return self

    def result(self, end: dict[str, Any]) -> float | None:
        return end.get("accuracy")

    def score(self, lines: Sequence[dict[str, Any]]) -> float:
        """The best test accuracy over epochs, as in the paper; 0 if the run diverged in its first epoch."""
        epochs = [line for line in lines if line["type"] == "epoch"]
        return reported(epochs, "paper").accuracy if epochs else 0.0

    def share_done(self, line: dict[str, Any]) -> float:
        return line["epoch"] / self.train.epochs

    def classes(self) -> dict[str, type]:
        return {f"task {self.task.name!r}": task_class(self.task.name)}


def longest(task: TaskData) -> int:
    """The length of the longest sequence in any split."""
    return max(segment.seq_len for segment in task.train + task.test + task.held_out)
