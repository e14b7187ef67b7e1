"""The plan of a sweep: which runs it has, where each stands, and which of them are still to be trained."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rebased.models import LMConfig, preset
from rebased.models.presets import mqar_preset_names
from rebased.train.checkpoint import POINTER
from rebased.train.config import RunConfig, longest
from rebased.train.record import RECORD, read_record
from rebased.train.sweep.grid import Point

Status = Literal["new", "begun", "done", "diverged", "failed"]
SIZES = ("value_width",)  # follow from others, so they tell no two models apart


@dataclass(frozen=True)
class PlannedRun:
    config: RunConfig
    folder: Path
    model: str  # what tells its model from the others of the sweep, width and length apart
    status: Status
    error: str | None  # of a run that failed or diverged

    @property
    def digest(self) -> str:
        return self.folder.name

    @property
    def shape(self) -> str:
        return f"D {self.config.model.d_model}, T {longest(self.config.task)}"

    def __str__(self) -> str:
        return f"{self.model}, {self.shape}, lr {self.config.train.lr:g}, seed {self.config.train.seed}"


@dataclass(frozen=True)
class Plan:
    folder: Path
    runs: tuple[PlannedRun, ...]
    merged: int  # grid points that are the same run as another

    def count(self, *statuses: Status) -> int:
        return sum(run.status in statuses for run in self.runs)

    def to_do(self, retry_failed: bool) -> list[PlannedRun]:
        wanted = ("new", "begun", "failed") if retry_failed else ("new", "begun")
        return [run for run in self.runs if run.status in wanted]


def make_plan(points: Sequence[Point], folder: Path, failures: Mapping[str, str]) -> Plan:
    """Points of one digest are one run. Its folder has the digest for a name: so it is found again."""
    configs = {point.config.digest(): point.config for point in points}
    labels = model_labels([config.model for config in configs.values()])
    runs = []
    for (digest, config), label in zip(configs.items(), labels, strict=True):
        status, error = stand(folder / digest, failures.get(digest))
        runs.append(PlannedRun(config, folder / digest, label, status, error))
    return Plan(folder, tuple(runs), len(points) - len(configs))


def stand(folder: Path, failure: str | None) -> tuple[Status, str | None]:
    """Where a run stands, as its record tells it, and the error that it ended with."""
    try:
        lines = read_record(folder) if (folder / RECORD).exists() else []
    except ValueError as error:  # damaged: its training would end with the same words
        return "failed", str(error)
    end = lines[-1] if lines and lines[-1]["type"] == "end" else None
    if end:
        return end["status"], end.get("reason")
    if failure:
        return "failed", failure
    return ("begun" if (folder / POINTER).exists() else "new"), None


def model_labels(models: Sequence[LMConfig]) -> list[str]:
    """A name for each model: that of the preset with its pattern of mixers, and what else tells it from its like."""
    patterns = {tuple(m.name for m in preset(name, d_model=12).mixers): name for name in mqar_preset_names()}
    names, arguments = [], list[dict[str, Any]]()
    values: dict[tuple[str, str], set[str]] = {}  # that models of one name have for an argument
    for model in models:
        pattern = tuple(mixer.name for mixer in model.mixers)
        names.append(patterns.get(pattern, "+".join(dict.fromkeys(pattern))))
        arguments.append(
            {
                f"{i}.{key}": value
                for i, mixer in enumerate(model.mixers)
                for key, value in mixer.arguments().items()
                if key not in SIZES
            }
        )
        for key, value in arguments[-1].items():
            values.setdefault((names[-1], key), set()).add(str(value))
    labels = []
    for name, own in zip(names, arguments, strict=True):
        telling = [key for key in own if len(values[name, key]) > 1]
        labels.append(" ".join([name, *(f"{key.partition('.')[2]}={own[key]}" for key in telling)]))
    return labels


def breakdown(runs: Sequence[PlannedRun]) -> dict[str, dict[str, Counter[Status]]]:
    """How many runs of each status, by model and by shape, in the order of the grid."""
    table: dict[str, dict[str, Counter[Status]]] = {}
    for run in runs:
        table.setdefault(run.model, {}).setdefault(run.shape, Counter())[run.status] += 1
    return table
