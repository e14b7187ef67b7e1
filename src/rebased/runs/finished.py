"""A run as its record tells it: what tables and figures are computed from."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from rebased.mixers import can_extend
from rebased.models import LanguageModel, LMConfig, shape_of
from rebased.runs.protocol import Reported, reported
from rebased.runs.record import read_record
from rebased.runs.run_names import kind_of
from rebased.runs.synthetic_config import RunConfig
from rebased.tasks import DEFAULT_TASK


@dataclass(frozen=True)
class Run:
    folder: str  # its name alone: where on a machine it stands is nobody's business
    lines: list[dict[str, Any]]

    @cached_property
    def config(self) -> RunConfig:
        return RunConfig.model_validate(self.lines[0]["config"])

    @property
    def settings(self) -> dict[str, Any]:
        """The config as it was written, which other code than today's, or mixers of a user's own, may have made."""
        return self.lines[0]["config"]

    @cached_property
    def epochs(self) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["type"] == "epoch"]

    @property
    def digest(self) -> str:
        return self.lines[0]["digest"]

    @property
    def task(self) -> str:
        """The name of its task, which records from before there were several do not say."""
        return self.settings["task"].get("name", DEFAULT_TASK)

    @cached_property
    def model(self) -> str:
        return kind_of(self.settings["model"])

    @property
    def d_model(self) -> int:
        return self.settings["model"]["d_model"]

    @property
    def lr(self) -> float:
        return self.settings["train"]["lr"]

    @property
    def seed(self) -> int:
        return self.settings["train"]["seed"]

    @property
    def parameters(self) -> int:
        return self.lines[0]["parameters"]

    @property
    def status(self) -> str:
        """done, diverged or failed, as its last line says; unfinished where it says nothing."""
        return self.lines[-1]["status"] if self.lines[-1]["type"] == "end" else "unfinished"

    @property
    def accuracies(self) -> list[float]:
        """On the test split, epoch by epoch."""
        return [line["test"]["accuracy"] for line in self.epochs]

    def epochs_until(self, mark: float) -> int | None:
        """The number of the first epoch whose test accuracy was at least `mark`; None if there was none."""
        return next((line["epoch"] for line in self.epochs if line["test"]["accuracy"] >= mark), None)

    @property
    def reported(self) -> Reported:
        return reported(self.epochs, self.settings["train"]["protocol"])

    @cached_property
    def best(self) -> Reported:
        """The best epoch on the test split, as in the paper; a run that diverged before its first end has 0."""
        return reported(self.epochs, "paper") if self.epochs else Reported(0.0, 0)

    @property
    def best_epoch(self) -> dict[str, Any] | None:
        """That epoch's line; a record may lack others."""
        return next((line for line in self.epochs if line["epoch"] == self.best.epoch), None)

    @cached_property
    def held_out(self) -> float | None:
        """That same epoch's accuracy on the split that nothing was chosen on; None where there is no such split."""
        if not self.settings["task"].get("held_out"):
            return None
        return reported(self.epochs, "held_out").accuracy if self.epochs else 0.0

    @property
    def seconds(self) -> float:
        return sum(line["seconds"] + line["test_seconds"] for line in self.epochs)

    @property
    def seq_len(self) -> int:
        """The longest sequence it was tested on."""
        return max(segment["seq_len"] for segment in self.settings["task"]["test"])

    @property
    def code(self) -> str:
        """The version of the code that it ended with."""
        code = [line for line in self.lines if line["type"] in ("run", "resume")][-1]["code"]
        commit = f" {code['commit'][:10]}" if code["commit"] else ""
        return f"{code['version']}{commit}{' + changes' if code['dirty'] else ''}"

    @property
    def device(self) -> str:
        machine = self.lines[0]["machine"]
        return machine["gpu"] or machine["cpu"]

    def state_bytes(self, seq_len: int) -> int | None:
        """What the model remembers of one sequence after so many tokens, in fp32; None where a mixer has no state, or
        is not known here."""
        return _state_bytes(json.dumps(self.settings["model"], sort_keys=True), seq_len)


@cache
def _state_bytes(model: str, seq_len: int) -> int | None:
    shape = _shape(model)
    if shape is None or not all(can_extend(block.mixer) for block in shape.blocks):
        return None
    return 4 * shape.state_size(seq_len)


@cache
def _shape(model: str) -> LanguageModel | None:
    try:
        config = LMConfig.model_validate(json.loads(model))
    except ValueError:  # a mixer of the user's own, or a setting of other code
        return None
    return shape_of(config)


def read_run(folder: Path) -> Run:
    lines = read_record(folder)
    if not any(line["type"] == "epoch" for line in lines):
        raise ValueError(f"{folder} has no epoch in its record yet; train it first, or go on with --resume")
    return Run(folder.name, lines)


def by_model(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """The runs of each model, models in the order in which they first appear."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.model, []).append(run)
    return groups
