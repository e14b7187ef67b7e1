"""Runs to results: one a task, model and width, at the learning rate that stands for it."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any, Literal

from rebased.analysis import Choice, Spread, choose_lr, describe
from rebased.report.synthetic.paper import KERNEL_ORDER, Reading, paper_reading
from rebased.runs.finished import Run
from rebased.runs.run_names import ModelName, model_names, task_names

SliceKind = Literal["by_pairs", "by_length", "slices"]
COUNTED = ("done", "diverged")
"""Runs that are results. One that diverged counts with the best accuracy it had reached, or 0: the paper's rule, the
maximum over epochs, asks no more. One that is unfinished or failed for other reasons is no result yet."""


@dataclass(frozen=True)
class Cell:
    task: str
    model: ModelName
    d_model: int
    runs: Mapping[float, Mapping[int, Run]]  # lr, seed

    @property
    def all_runs(self) -> list[Run]:
        """At every rate, not at the chosen one alone."""
        return [run for seeds in self.runs.values() for run in seeds.values()]

    @cached_property
    def choice(self) -> Choice:
        """By the mean over seeds of the test accuracy, whatever is reported then."""
        return choose_lr(
            {lr: {seed: run.best.accuracy for seed, run in runs.items()} for lr, runs in self.runs.items()}
        )

    @property
    def chosen(self) -> Mapping[int, Run]:
        """By seed, the runs at the chosen rate."""
        return self.runs[self.choice.lr]

    @property
    def any_run(self) -> Run:
        return next(iter(self.chosen.values()))

    @cached_property
    def test(self) -> Spread:
        return describe([run.best.accuracy for run in self.chosen.values()])

    @cached_property
    def held_out(self) -> Spread | None:
        """On the split that nothing was chosen on: lr and epoch were chosen on the test split."""
        values = [run.held_out for run in self.chosen.values()]
        known = [value for value in values if value is not None]
        return describe(known) if len(known) == len(values) else None

    def accuracies(self, held_out: bool) -> dict[int, float]:
        """By seed, at the chosen rate."""
        both = {seed: (run.best.accuracy, run.held_out) for seed, run in self.chosen.items()}
        return {seed: other if held_out and other is not None else test for seed, (test, other) in both.items()}

    @cached_property
    def lr_means(self) -> list[float]:
        """The mean over seeds at each rate that could be chosen, whatever order they were tried in."""
        rates = [lr for lr in sorted(self.runs) if lr not in self.choice.left_out]
        return [fmean(run.best.accuracy for run in self.runs[lr].values()) for lr in rates]

    def slices(self, kind: SliceKind) -> dict[Any, float]:
        """By pairs or length (numbers), or by a task's own slices (names): mean over seeds in the reported epoch, on
        the held-out split where there is one. Empty where the task has no such parts."""
        split = "held_out" if self.held_out else "test"
        lines = [run.best_epoch for run in self.chosen.values()]
        found = {key for line in lines if line for key in line[split].get(kind, {})}
        keys = sorted(found) if kind == "slices" else sorted(map(int, found))
        return {key: fmean(line[split][kind][str(key)] if line else 0.0 for line in lines) for key in keys}

    @property
    def state_bytes(self) -> int | None:
        """At the task's longest sequence; None where a mixer has no state, or is not known here."""
        return self.any_run.state_bytes(self.any_run.seq_len)

    @cached_property
    def paper(self) -> Reading | None:
        return paper_reading(self.any_run)


@dataclass(frozen=True)
class Results:
    cells: Sequence[Cell]  # by task (shortest first), model, width
    repeated: int  # runs that differ from another in nothing that is learnt, such as the device: left out

    @cached_property
    def tasks(self) -> list[str]:
        return list(dict.fromkeys(cell.task for cell in self.cells))

    @cached_property
    def models(self) -> list[ModelName]:
        """The kernels of Table 1 in its order, then the others."""
        names = list(dict.fromkeys(cell.model for cell in self.cells))
        return sorted(names, key=order_of)

    @cached_property
    def widths(self) -> list[int]:
        return sorted({cell.d_model for cell in self.cells})

    def of_task(self, task: str) -> list[Cell]:
        return [cell for cell in self.cells if cell.task == task]

    def any_cell(self, model: ModelName) -> Cell:
        return next(cell for cell in self.cells if cell.model == model)

    def find(self, task: str, model: ModelName, d_model: int) -> Cell | None:
        return self._at.get((task, model, d_model))

    @cached_property
    def _at(self) -> dict[tuple[str, ModelName, int], Cell]:
        return {(cell.task, cell.model, cell.d_model): cell for cell in self.cells}


def order_of(model: ModelName) -> tuple[int, list[tuple[int, str]]]:
    """As in Table 1; what it does not have follows, by name, 2 before 12."""
    words = [(int(word) if word.isdecimal() else -1, word) for word in re.split(r"(\d+)", str(model))]
    return KERNEL_ORDER.index(model.kind) if model.kind in KERNEL_ORDER else len(KERNEL_ORDER), words


def build_results(runs: Sequence[Run]) -> Results:
    counted = [run for run in runs if run.status in COUNTED]
    if not counted:
        raise ValueError(f"none of the {len(runs)} runs has ended yet; go on with them (--resume), then report")
    settings = [run.settings for run in counted]
    tasks = task_names(settings)
    models = model_names(settings, tasks)
    groups: dict[tuple[str, ModelName, int], dict[float, dict[int, Run]]] = {}
    repeated = 0
    for run, task, model in zip(counted, tasks, models, strict=True):
        seeds = groups.setdefault((task, model, run.d_model), {}).setdefault(run.lr, {})
        repeated += run.seed in seeds
        seeds.setdefault(run.seed, run)
    cells = [Cell(*key, groups[key]) for key in groups]
    cells.sort(key=lambda cell: (cell.any_run.seq_len, cell.task, order_of(cell.model), cell.d_model))
    return Results(cells, repeated)
