"""Runs to results: one cell per task, model and width, at its chosen learning rate."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any, Literal

from rebased.analysis.selection import Choice, choose_lr
from rebased.analysis.spread import Spread, describe
from rebased.report.reference_values import NO_VALUES, Reference, ReferenceValue, ReferenceValues
from rebased.runs.finished import Run, no_result, one_of
from rebased.runs.run_names import MODEL_ORDER, ModelName, model_names, task_names

SliceKind = Literal["by_pairs", "by_length", "slices"]
COUNTED = ("done", "diverged")
"""Runs that are results. A diverged run counts with the best accuracy it had reached, or 0, because the best
epoch counts. A run that is unfinished or failed is no result."""

LEARNED = 0.05
"""How far above guessing a run must be to have learned something."""


@dataclass(frozen=True)
class Cell:
    """The runs of one model, task and width, at several learning rates and seeds."""

    task: str
    model: ModelName
    d_model: int
    runs: Mapping[float, Mapping[int, Run]]  # lr, seed
    known: ReferenceValues = NO_VALUES

    @property
    def all_runs(self) -> list[Run]:
        """The runs at all learning rates, not only at the chosen one."""
        return [run for seeds in self.runs.values() for run in seeds.values()]

    @cached_property
    def choice(self) -> Choice:
        """The learning rate with the best mean test accuracy over seeds."""
        return choose_lr(self._tested())

    def _tested(self, without: int | None = None) -> dict[float, dict[int, float]]:
        """Test accuracy by learning rate and seed, except for the seed `without`."""
        return {
            lr: {seed: run.best.accuracy for seed, run in runs.items() if seed != without}
            for lr, runs in self.runs.items()
        }

    @property
    def chosen(self) -> Mapping[int, Run]:
        """The runs at the chosen learning rate, by seed."""
        return self.runs[self.choice.lr]

    @property
    def any_run(self) -> Run:
        """One of the chosen runs, for settings that all of them share."""
        return next(iter(self.chosen.values()))

    @cached_property
    def test(self) -> Spread:
        """Test accuracy of each run's best epoch, over the seeds of the chosen runs."""
        return describe([run.best.accuracy for run in self.chosen.values()])

    @cached_property
    def held_out(self) -> Spread | None:
        """Accuracy on the held-out split, in the epoch chosen on the test split; None unless all runs have it."""
        known = [run.held_out for run in self.chosen.values() if run.held_out is not None]
        return describe(known) if len(known) == len(self.chosen) else None

    def accuracies(self, held_out: bool) -> dict[int, float]:
        """By seed: accuracy on the test split, or with `held_out` on the held-out split where a run has one."""
        return {seed: accuracy_of(run, held_out) for seed, run in self.chosen.items()}

    def unselected(self, held_out: bool) -> dict[int, float]:
        """As `accuracies`, but each seed at the rate that is best on the other seeds: no seed has a say in its own
        rate. Of a search in stages only the seeds count on which no rate was chosen, if there are two or more."""
        known = self.accuracies(held_out)
        if self.choice.staged:
            later = {seed: value for seed, value in known.items() if seed not in self.choice.staged}
            return later if len(later) > 1 else known
        if len(self.runs) == 1 or len({seed for runs in self.runs.values() for seed in runs}) == 1:
            return known
        rates = {seed: choose_lr(self._tested(without=seed)).lr for seed in known}
        return {seed: accuracy_of(self.runs[lr][seed], held_out) for seed, lr in rates.items() if seed in self.runs[lr]}

    @cached_property
    def lr_means(self) -> list[float]:
        """Mean test accuracy over seeds, for each learning rate that could be chosen, in increasing order."""
        rates = [lr for lr in sorted(self.runs) if lr not in self.choice.left_out]
        return [fmean(run.best.accuracy for run in self.runs[lr].values()) for lr in rates]

    def slices(self, kind: SliceKind) -> dict[Any, float]:
        """Accuracy by number of pairs or by length (numbers), or by a task's own slices (names): mean over seeds in the
        best epoch, on the held-out split if any. Empty where the task has no such slices. A run counts 0 if it has no
        epoch, and does not count for a slice that its record lacks."""
        split = "held_out" if self.held_out else "test"
        lines = [run.best_epoch for run in self.chosen.values()]
        parts = [line[split].get(kind, {}) for line in lines if line]
        found = {key for part in parts for key in part}
        keys = sorted(found) if kind == "slices" else sorted(map(int, found))
        nothing = [0.0] * (len(lines) - len(parts))
        return {key: fmean([part[str(key)] for part in parts if str(key) in part] + nothing) for key in keys}

    @property
    def state_bytes(self) -> int | None:
        """Bytes of state after the task's longest sequence; None if a mixer has no state or is not known here."""
        return self.any_run.state_bytes(self.any_run.seq_len)

    @cached_property
    def reference(self) -> Reference:
        """What others report for this cell."""
        return self.known.of(self.any_run)

    @property
    def reference_value(self) -> ReferenceValue | None:
        """The accuracy that others report for this cell."""
        return self.reference.values.get("accuracy")


@dataclass(frozen=True)
class Results:
    """All cells of a report."""

    cells: Sequence[Cell]  # by task (shortest first), model, width
    repeated: int  # runs left out because they differ from another only in execution settings, such as the device
    known: ReferenceValues = NO_VALUES

    @cached_property
    def tasks(self) -> list[str]:
        """Names of the tasks, shortest sequences first."""
        return list(dict.fromkeys(cell.task for cell in self.cells))

    @cached_property
    def models(self) -> list[ModelName]:
        """Based, the kernels of ReBased, and ReBased; then the others by name."""
        return sorted(dict.fromkeys(cell.model for cell in self.cells), key=order_of)

    @cached_property
    def widths(self) -> list[int]:
        """All model widths, in increasing order."""
        return sorted({cell.d_model for cell in self.cells})

    def of_task(self, task: str) -> list[Cell]:
        """The cells of one task."""
        return [cell for cell in self.cells if cell.task == task]

    def learned(self, task: str) -> bool:
        """False if no run of the task is better than guessing by LEARNED. True where the level of guessing is not
        known."""
        return any(has_learned(run) for cell in self.of_task(task) for run in cell.all_runs)

    def find(self, task: str, model: ModelName, d_model: int) -> Cell | None:
        """The cell of a task, model and width, or None."""
        place = (task, model, d_model)
        return next((cell for cell in self.cells if (cell.task, cell.model, cell.d_model) == place), None)


def accuracy_of(run: Run, held_out: bool) -> float:
    """The accuracy on the test split, or with `held_out` on the held-out split if the run has one."""
    return run.held_out if held_out and run.held_out is not None else run.best.accuracy


def has_learned(run: Run) -> bool:
    """False if the run is not better than guessing by LEARNED. True where the level of guessing is not known."""
    return run.chance is None or run.best.accuracy >= run.chance + LEARNED


def order_of(model: ModelName) -> tuple[int, list[tuple[int, str]]]:
    """A key to sort models by: those of MODEL_ORDER, then the others by name, with 2 before 12."""
    words = [(int(word) if word.isdecimal() else -1, word) for word in re.split(r"(\d+)", str(model))]
    return MODEL_ORDER.index(model.kind) if model.kind in MODEL_ORDER else len(MODEL_ORDER), words


def build_results(runs: Sequence[Run], known: ReferenceValues = NO_VALUES) -> Results:
    """Group the runs that have ended into cells. ValueError if none has. `known` is what others report for them."""
    counted = [run for run in runs if run.status in COUNTED]
    if not counted:
        raise ValueError(no_result(runs))
    settings = [run.settings for run in counted]
    tasks = task_names(settings)
    models = model_names(settings, tasks)
    groups: dict[tuple[str, ModelName, int], dict[float, dict[int, Run]]] = {}
    for run, task, model in zip(counted, tasks, models, strict=True):
        seeds = groups.setdefault((task, model, run.d_model), {}).setdefault(run.lr, {})
        seeds[run.seed] = one_of(seeds.get(run.seed), run)
    cells = [Cell(*key, found, known) for key, found in groups.items()]
    cells.sort(key=lambda cell: (cell.any_run.seq_len, cell.task, order_of(cell.model), cell.d_model))
    return Results(cells, len(counted) - sum(len(cell.all_runs) for cell in cells), known)
