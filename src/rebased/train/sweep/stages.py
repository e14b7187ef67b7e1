"""The stages of a sweep: every value of a setting with the first seeds, then the best value with the other seeds."""

import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Literal

from rebased.analysis.selection import choose_lr
from rebased.runs.collect import ENDED
from rebased.runs.run_names import flatten
from rebased.train.sweep.grid import SEED, Select
from rebased.train.sweep.plan import PlannedRun

Role = Literal["first", "waiting", "chosen", "other"]
"""What a run is for: to choose a value (first), with the chosen value (chosen), with another value (other). Runs with
the other seeds are waiting until their cell's value is chosen."""


class Stages:
    """Which runs of a sweep may be trained by now. The runs of a cell differ in `select.setting` and the seed alone."""

    def __init__(self, select: Select, runs: Sequence[PlannedRun]) -> None:
        self.select = select
        self._cells: dict[str, Cell] = {}
        self._cell_of: dict[str, Cell] = {}
        for run in runs:
            leaves = flatten(run.config.model_dump(mode="json"))
            value, seed = leaves.pop(select.setting, None), leaves.pop(SEED)
            cell = self._cells.setdefault(json.dumps(leaves, sort_keys=True), Cell(select.seeds))
            self._cell_of[run.digest] = cell
            cell.runs[run.digest] = value, seed
        for run in runs:
            if run.status in ENDED:
                self.ended(run.digest, run.config.score(run.lines))
            elif run.status == "failed":
                self.ended(run.digest, None)

    @property
    def undecided(self) -> int:
        """The number of cells whose value has not been chosen yet."""
        return sum(cell.choice is None for cell in self._cells.values())

    def role(self, run: PlannedRun) -> Role:
        """What a run is for, as far as it is known."""
        cell = self._cell_of[run.digest]
        value, seed = cell.runs[run.digest]
        if len(cell.values) == 1:
            return "chosen"
        if seed in cell.first_seeds:
            return "first"
        return "waiting" if cell.choice is None else "chosen" if value == cell.choice else "other"

    def share(self, run: PlannedRun) -> float:
        """How probable it is that a run will be trained, if every value is equally likely to be chosen."""
        role = self.role(run)
        if role == "waiting" and self.select.others == "skip":
            return 1 / len(self._cell_of[run.digest].values)
        return float(role != "other" or self.select.others == "last")

    def is_stuck(self, run: PlannedRun) -> bool:
        """True if a run waits for a choice that cannot be made: all runs to choose by have failed."""
        cell = self._cell_of[run.digest]
        return self.role(run) == "waiting" and all(digest in cell.scores for digest in cell.tried)

    def again(self, digest: str) -> None:
        """Forget the end of a run that is trained again."""
        self._cell_of[digest].scores.pop(digest, None)
        self._cell_of[digest].choose_again()

    def ended(self, digest: str, score: float | None) -> None:
        """Note the score of a run that has ended; None: it failed, and does not count."""
        self._cell_of[digest].scores[digest] = score
        self._cell_of[digest].choose_again()


class Cell:
    """The runs among which one value is chosen."""

    def __init__(self, seeds: int) -> None:
        self._seeds = seeds
        self.runs: dict[str, tuple[Any, int]] = {}  # by digest: the value and the seed
        self.scores: dict[str, float | None] = {}  # by digest, of the runs that have ended

    def choose_again(self) -> None:
        """Forget the choice: the scores have changed."""
        self.__dict__.pop("choice", None)

    @cached_property
    def first_seeds(self) -> list[int]:
        """The seeds on which the value is chosen: the first ones of the grid."""
        return list(dict.fromkeys(seed for _, seed in self.runs.values()))[: self._seeds]

    @cached_property
    def values(self) -> list[Any]:
        """The values, numbers in increasing order: of equally good ones the first is chosen."""
        found = list({json.dumps(value): value for value, _ in self.runs.values()}.values())
        return sorted(found) if all(isinstance(value, int | float) for value in found) else found

    @cached_property
    def tried(self) -> list[str]:
        """The digests of the runs by which the value is chosen."""
        return [digest for digest, (_, seed) in self.runs.items() if seed in self.first_seeds]

    @cached_property
    def choice(self) -> Any:
        """The chosen value: the best mean score over the first seeds. None before all of these runs have ended."""
        values = self.values
        if len(values) == 1:
            return values[0]
        if not all(digest in self.scores for digest in self.tried):
            return None
        scores: dict[float, dict[int, float]] = {}
        for digest in self.tried:
            value, seed = self.runs[digest]
            if (score := self.scores[digest]) is not None:
                scores.setdefault(values.index(value), {})[seed] = score
        return values[int(choose_lr(scores).lr)] if scores else None
