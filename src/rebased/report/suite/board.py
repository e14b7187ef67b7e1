"""What the runs of a suite show: one cell per mixer, task and size of state; places, and effects of factors."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isnan
from statistics import fmean, median
from typing import Literal

from rebased.analysis.ranking import Contrast, compare_pairs, main_effects, places
from rebased.analysis.selection import choose_lr
from rebased.analysis.spread import student_interval
from rebased.analysis.unpaired import Groups
from rebased.config import plain
from rebased.runs.collect import ENDED
from rebased.runs.finished import Run, one_of
from rebased.runs.suite import Suite, part_of

Outcome = Literal["recall", "began"]
LONGEST = 60  # letters of a mixer's name
REPEATED = "the same as another except for execution settings"


@dataclass(frozen=True)
class SuiteCell:
    """The runs of one mixer on one task with one size of state."""

    suite: Suite
    mixer: str
    task: str
    budget: int | None
    runs: Sequence[Run]
    anchor: str  # the name of the list of its runs on the page

    @cached_property
    def rate(self) -> float | None:
        """The rate that is best on the test split over the choosing seeds; None before all of these runs have ended."""
        tried: dict[float, dict[int, float]] = {rate: {} for rate in self.suite.rates}
        for run in self.runs:
            if run.seed in self.suite.choose_seeds:
                tried[run.lr][run.seed] = run.best.accuracy
        whole = all(len(seeds) == len(self.suite.choose_seeds) for seeds in tried.values())
        return choose_lr(tried).lr if whole else None

    @property
    def began_to_choose(self) -> int:
        """How many of the runs that chose the rate had begun to learn. If none had, chance chose it."""
        best = (run.best.accuracy for run in self.runs if run.seed in self.suite.choose_seeds)
        return sum(accuracy > self.suite.tasks[self.task].began for accuracy in best)

    @property
    def is_untuned(self) -> bool:
        """True if there were several rates and no run that chose among them had begun to learn."""
        return self.rate is not None and len(self.suite.rates) > 1 and not self.began_to_choose

    @cached_property
    def scored(self) -> list[Run]:
        """The runs at the chosen rate with fresh seeds, in the order of the seeds."""
        found = {run.seed: run for run in self.runs if run.lr == self.rate and run.seed in self.suite.score_seeds}
        return [found[seed] for seed in sorted(found)]

    @property
    def is_complete(self) -> bool:
        """True if every seed has been scored."""
        return len(self.scored) == len(self.suite.score_seeds)

    def values(self, outcome: Outcome = "recall") -> list[float]:
        """Held-out accuracy per scored run; or 1 if it has begun to learn, and 0 if not."""
        if outcome == "recall":
            return [run.held_out or 0.0 for run in self.scored]
        return [float(run.best.accuracy > self.suite.tasks[self.task].began) for run in self.scored]

    @property
    def mean(self) -> float:
        """The mean held-out accuracy."""
        return fmean(self.values())

    @cached_property
    def interval(self) -> tuple[float, float]:
        """Student's 95 % interval of the mean, within 0 and 1; nan for fewer than three runs."""
        low, high = student_interval(self.values())
        return (low, high) if isnan(low) else (max(low, 0.0), min(high, 1.0))

    @cached_property
    def layer_bytes(self) -> int | None:
        """Bytes of the state of the compared layer after the longest sequence; None if it is not known here."""
        try:
            return self.suite.layer_bytes(self.runs[0].settings["model"], self.runs[0].seq_len)
        except ValueError:  # a user's own mixer, or one without a state
            return None

    @property
    def parameters(self) -> int:
        """The parameters of the whole model."""
        return self.runs[0].parameters


class Board:
    """Everything that the page of a suite says. `own` are the mixers that the reader has asked about."""

    def __init__(self, suite: Suite, runs: Sequence[Run], own: Sequence[str] = ()) -> None:
        self.suite, self.own = suite, list(own)
        self.left_out: Counter[str] = Counter()
        self._effects: dict[tuple[str, Outcome], list[Contrast]] = {}
        groups: dict[tuple[str, str, int | None], dict[tuple[float, int], Run]] = {}
        for run in runs:
            reason = "not finished" if run.status not in ENDED else suite.why_not(run)
            part = part_of(run)
            if reason or part is None:
                self.left_out[reason or ""] += 1
                continue
            label = plain(part.mixer)[:LONGEST]
            cell, place = groups.setdefault((label, part.task, part.state_bytes), {}), (run.lr, run.seed)
            if place in cell:
                self.left_out[REPEATED] += 1
            cell[place] = one_of(cell.get(place), run)
        found = {mixer for mixer, *_ in groups}
        self.mixers = [name for name in dict.fromkeys((*self.own, *suite.mixers, *sorted(found))) if name in found]
        self.cells = [
            SuiteCell(suite, *key, list(groups[key].values()), f"runs-{m}-{t}-{key[2] or 0}")
            for m, mixer in enumerate(self.mixers)
            for t, task in enumerate(suite.tasks)
            for key in ((mixer, task, budget) for budget in (None, *suite.state_bytes))
            if key in groups
        ]

    @cached_property
    def tasks(self) -> list[str]:
        """The tasks of the suite that have a scored run; all of them if none has."""
        scored = {cell.task for cell in self.cells if cell.scored}
        return [task for task in self.suite.tasks if task in scored] or list(self.suite.tasks)

    @property
    def runs(self) -> list[Run]:
        """The runs of all cells."""
        return [run for cell in self.cells for run in cell.runs]

    def of(self, mixer: str) -> list[SuiteCell]:
        """The cells of a mixer that have a scored run."""
        return [cell for cell in self.cells if cell.mixer == mixer and cell.scored]

    def values(self, outcome: Outcome = "recall", task: str | None = None) -> dict[str, Groups]:
        """The scores of complete cells whose state is known to be bounded, as {mixer: {(task, budget): values}}."""
        found: dict[str, Groups] = {}
        for cell in self.cells:
            if cell.is_complete and cell.budget is not None and cell.layer_bytes and task in (None, cell.task):
                found[cell.mixer] = {**found.get(cell.mixer, {}), (cell.task, cell.budget): cell.values(outcome)}
        return found

    @cached_property
    def ranked(self) -> dict[str, Groups]:
        """The scores of the ranked mixers, all on the same cells: those that the reader's own mixer has completed, or
        those that more than half of all mixers have. A mixer that lacks one of them is not ranked."""
        values = self.values()
        counts = Counter(cell for groups in values.values() for cell in groups)
        own = next((values[name] for name in self.own if name in values), None)
        cells = own if own is not None else [cell for cell in counts if 2 * counts[cell] > len(values)]
        return {
            name: {cell: groups[cell] for cell in cells}
            for name, groups in values.items()
            if all(cell in groups for cell in cells)
        }

    @cached_property
    def contrasts(self) -> list[Contrast]:
        """Every two ranked mixers; Holm over all pairs."""
        return compare_pairs(self.ranked)

    @cached_property
    def places(self) -> dict[str, int]:
        """The place of each ranked mixer. Mixers that cannot be told apart share one."""
        found = places(list(self.ranked), self.contrasts)
        return dict(sorted(found.items(), key=lambda each: (each[1], each[0].casefold())))

    def effects(self, task: str, outcome: Outcome = "recall") -> list[Contrast]:
        """The main effects of the factors on a task; Holm within the task."""
        if (task, outcome) not in self._effects:
            factors = {name: mixer.factors for name, mixer in self.suite.mixers.items() if mixer.factors}
            values = {name: groups for name, groups in self.values(outcome, task).items() if name in factors}
            self._effects[task, outcome] = [one for one in main_effects(values, factors) if one.cells]
        return self._effects[task, outcome]

    def overall(self, mixer: str) -> tuple[float, tuple[float, float]]:
        """The mean of a ranked mixer over the cells, and its interval over seeds."""
        by_seed = [fmean(values) for values in zip(*self.ranked[mixer].values(), strict=True)]
        return fmean(by_seed), student_interval(by_seed)

    def parameter_ratio(self, cell: SuiteCell) -> float:
        """The parameters of a cell's model, divided by the median over all mixers with this task and size of state."""
        same = [each.parameters for each in self.cells if (each.task, each.budget) == (cell.task, cell.budget)]
        return cell.parameters / median(same)

    @cached_property
    def unfinished(self) -> str:
        """How many cells of the suite's mixers and of the reader's own are complete, in words; "" if all are."""
        planned = len(self.suite.tasks) * sum(len(self.suite.budgets(mixer)) for mixer in self.suite.mixers.values())
        total = planned + sum(cell.mixer not in self.suite.mixers for cell in self.cells)
        done = sum(cell.is_complete for cell in self.cells)
        return f"Partial results: {done} of {total} cells are complete." if done < total else ""

    @property
    def factors(self) -> list[str]:
        """The factors by which mixers of the suite differ."""
        return list(dict.fromkeys(factor for mixer in self.suite.mixers.values() for factor in mixer.factors))
