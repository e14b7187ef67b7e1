"""The plan of a sweep: its runs, the status of each, and which of them are still to be trained."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rebased.runs.collect import ENDED
from rebased.runs.finished import Run
from rebased.runs.own_code import changed_code
from rebased.runs.record import RECORD, read_record
from rebased.runs.run_config import RunConfig
from rebased.runs.run_names import model_names, task_names
from rebased.runs.synthetic_config import SuitePart
from rebased.train.checkpoint import POINTER
from rebased.train.sweep.grid import Point

Status = Literal["new", "begun", "done", "diverged", "failed"]


@dataclass(frozen=True)
class PlannedRun:
    """A run of a sweep and its status."""

    config: RunConfig
    folder: Path
    task: str  # its name, from names_of
    model: str  # its name, from names_of
    status: Status
    error: str | None  # of a run that failed or diverged
    lines: Sequence[dict[str, Any]] = ()  # of its record when the plan was made
    known: bool = False  # its result is from a known bundle, not from the folder

    @property
    def digest(self) -> str:
        """The digest of the config, which is the name of the folder."""
        return self.folder.name

    @property
    def name(self) -> tuple[str, ...]:
        """What tells it apart: model, task, width, learning rate and seed, in words."""
        train = self.config.train
        return self.model, self.task, f"D = {self.config.model.d_model}", f"lr {train.lr:g}", f"seed {train.seed}"

    def __str__(self) -> str:
        return ", ".join(self.name)


@dataclass(frozen=True)
class Plan:
    """The runs of a sweep."""

    folder: Path
    runs: tuple[PlannedRun, ...]
    merged: int  # grid points that are the same run as another

    def count(self, *statuses: Status) -> int:
        """The number of runs that have one of these statuses."""
        return sum(run.status in statuses for run in self.runs)

    def outdated(self) -> Counter[str]:
        """How many runs that have begun were trained before a change of the user's own mixer or task: by its name."""
        return Counter(what for run in self.runs for what in changed_code(run.lines, run.config))

    def to_do(self, retry_failed: bool) -> list[PlannedRun]:
        """The runs that are still to be trained, with or without those that failed before."""
        wanted = ("new", "begun", "failed") if retry_failed else ("new", "begun")
        return [run for run in self.runs if run.status in wanted]


def make_plan(
    points: Sequence[Point], folder: Path, failures: Mapping[str, str], known: Mapping[str, Run] | None = None
) -> Plan:
    """The plan for these points. Points with the same digest are one run, in the folder named by the digest.

    `failures` are the errors that the sweep has logged, `known` the runs that ended elsewhere, both by digest.
    """
    known = known or {}
    configs = {point.config.digest(): point.config for point in points}
    runs = []
    for (digest, config), (model, task) in zip(configs.items(), names_of(list(configs.values())), strict=True):
        standing = status_of(folder / digest, failures.get(digest))
        elsewhere = digest in known and standing.status not in ENDED
        if elsewhere:
            standing = standing_of(known[digest].lines)
        runs.append(PlannedRun(config, folder / digest, task, model, *standing, known=elsewhere))
    return Plan(folder, tuple(runs), len(points) - len(configs))


def names_of(configs: Sequence[RunConfig]) -> list[tuple[str, str]]:
    """Model and task of each run, as its suite names them, or else as reports do."""
    parts: list[SuitePart] = [part for config in configs if (part := getattr(config, "suite", None))]
    if len(parts) == len(configs):
        limits = ["" if part.state_bytes is None else f" ({part.state_bytes:,} bytes)" for part in parts]
        return [(f"{part.mixer}{limit}", part.task) for part, limit in zip(parts, limits, strict=True)]
    settings = [config.model_dump(mode="json") for config in configs]
    tasks = task_names(settings)
    return list(zip(map(str, model_names(settings, tasks)), tasks, strict=True))


class Standing(NamedTuple):
    """The status of a run, its error if it has one, and the lines of its record."""

    status: Status
    error: str | None = None
    lines: Sequence[dict[str, Any]] = ()


def standing_of(lines: Sequence[dict[str, Any]]) -> Standing:
    """The standing of a run whose record ends with a line of type "end"."""
    return Standing(lines[-1]["status"], lines[-1].get("reason"), lines)


def status_of(folder: Path, failure: str | None) -> Standing:
    """The standing of the run in a folder. `failure` is its last logged error, if any; the record comes first."""
    try:
        lines = read_record(folder) if (folder / RECORD).exists() else []
    except ValueError as error:  # damaged: to train it would fail with the same error
        return Standing("failed", str(error))
    if lines and lines[-1]["type"] == "end":
        return standing_of(lines)
    if failure:
        return Standing("failed", failure, lines)
    return Standing("begun" if (folder / POINTER).exists() else "new", None, lines)
