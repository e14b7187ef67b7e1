"""Runs to results: one a task, model and width, at the learning rate that stands for it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from rebased.analysis import Choice, Spread, choose_lr, describe
from rebased.report.names import model_names, task_names
from rebased.report.paper import KERNEL_ORDER, Reading, paper_reading
from rebased.report.runs import Run

COUNTED = ("done", "diverged")
"""Runs that are results. One that diverged counts with the best accuracy it had reached, or 0: the paper's rule, the
maximum over epochs, asks no more. One that is unfinished or failed for other reasons is no result yet."""


@dataclass(frozen=True)
class Cell:
    task: str
    model: str
    d_model: int
    runs: Mapping[float, Mapping[int, Run]]  # lr, seed

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

    @property
    def unselected(self) -> dict[int, float]:
        """By seed, the accuracy to compare models by: held out where there is such a split."""
        return {
            seed: run.best.accuracy if self.held_out is None or run.held_out is None else run.held_out
            for seed, run in self.chosen.items()
        }

    @property
    def paper(self) -> Reading | None:
        return paper_reading(self.any_run) if self.model == self.any_run.model else None


@dataclass(frozen=True)
class Results:
    cells: Sequence[Cell]  # by task (shortest first), model, width
    repeated: int  # runs that differ from another in nothing that is learnt, such as the device: left out

    @cached_property
    def tasks(self) -> list[str]:
        return list(dict.fromkeys(cell.task for cell in self.cells))

    @cached_property
    def models(self) -> list[str]:
        """The kernels of Table 1 in its order, then the others as they came."""
        names = list(dict.fromkeys(cell.model for cell in self.cells))
        return sorted(names, key=order_of)

    @cached_property
    def widths(self) -> list[int]:
        return sorted({cell.d_model for cell in self.cells})

    def of_task(self, task: str) -> list[Cell]:
        return [cell for cell in self.cells if cell.task == task]

    def find(self, task: str, model: str, d_model: int) -> Cell | None:
        return self._at.get((task, model, d_model))

    @cached_property
    def _at(self) -> dict[tuple[str, str, int], Cell]:
        return {(cell.task, cell.model, cell.d_model): cell for cell in self.cells}


def order_of(model: str) -> int:
    base = model.split(" (")[0]  # less what sets it apart from others of its name
    return KERNEL_ORDER.index(base) if base in KERNEL_ORDER else len(KERNEL_ORDER)


def build_results(runs: Sequence[Run]) -> Results:
    counted = [run for run in runs if run.status in COUNTED]
    if not counted:
        raise ValueError(f"none of the {len(runs)} runs has ended yet; go on with them (--resume), then report")
    tasks = task_names(counted)
    models = model_names(counted, tasks)
    groups: dict[tuple[str, str, int], dict[float, dict[int, Run]]] = {}
    repeated = 0
    for run, task, model in zip(counted, tasks, models, strict=True):
        seeds = groups.setdefault((task, model, run.d_model), {}).setdefault(run.lr, {})
        repeated += run.seed in seeds
        seeds.setdefault(run.seed, run)
    cells = [Cell(*key, groups[key]) for key in groups]
    cells.sort(key=lambda cell: (cell.any_run.seq_len, cell.task, order_of(cell.model), cell.model, cell.d_model))
    return Results(cells, repeated)
