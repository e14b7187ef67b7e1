"""What the runs of a suite show: one cell per mixer, task and size of state; places, and effects of factors."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isnan
from statistics import fmean
from typing import Literal

from rebased.analysis.intervals import Interval, t_interval
from rebased.analysis.ranking import Contrast, compare_pairs, main_effects, other_of, places, seeds_to_decide
from rebased.analysis.selection import choose_lr
from rebased.analysis.unpaired import Groups
from rebased.config import plain, plural
from rebased.report.demo import listed
from rebased.runs.collect import ENDED
from rebased.runs.finished import Run
from rebased.runs.suite import Suite, part_of

Outcome = Literal["recall", "began"]
MOST_SEEDS = 100  # a comparison that would need more is not worth its time
NAMED = 4  # mixers that a sentence names
LONGEST = 60  # letters of a mixer's name
MATCHED = 1.5  # a ratio of parameters below this needs no words


@dataclass(frozen=True)
class SuiteCell:
    """The runs of one mixer on one task with one size of state."""

    suite: Suite
    mixer: str
    task: str
    budget: int | None
    runs: Sequence[Run]

    @cached_property
    def rate(self) -> float | None:
        """The rate that is best on the test split over the choosing seeds; None before all of these runs have ended."""
        tried: dict[float, dict[int, float]] = {rate: {} for rate in self.suite.rates}
        for run in self.runs:
            if run.seed in self.suite.choose_seeds:
                tried[run.lr][run.seed] = run.best.accuracy
        whole = all(len(seeds) == len(self.suite.choose_seeds) for seeds in tried.values())
        return choose_lr(tried).lr if whole else None

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
    def interval(self) -> Interval:
        """Student's 95 % interval of the mean, within 0 and 1; nan for fewer than three runs."""
        low, high = t_interval(self.values())
        return Interval(low, high) if isnan(low) else Interval(max(low, 0.0), min(high, 1.0))

    @cached_property
    def layer_bytes(self) -> int | None:
        """Bytes of the state of the compared layer after the longest sequence; None if it is not known here."""
        return _layer_bytes(self.suite, self.runs[0])

    @property
    def anchor(self) -> str:
        """The name of the list of its runs on the page."""
        return f"runs-{self.mixer}-{self.task}-{self.budget or 0}".replace(" ", "-")


def _layer_bytes(suite: Suite, run: Run) -> int | None:
    try:
        return suite.layer_bytes(run.settings["model"], run.seq_len)
    except ValueError:  # a user's own mixer, or one without a state
        return None


class Board:
    """Everything that the page of a suite says. `own` are the mixers that the reader has asked about."""

    def __init__(self, suite: Suite, runs: Sequence[Run], own: Sequence[str] = ()) -> None:
        self.suite, self.own = suite, list(own)
        self.left_out: Counter[str] = Counter()
        groups: dict[tuple[str, str, int | None], dict[tuple[float, int], Run]] = {}
        for run in runs:
            reason = "not finished" if run.status not in ENDED else suite.why_not(run)
            part = part_of(run)
            if reason or part is None:
                self.left_out[reason or ""] += 1
                continue
            label = plain(part.mixer)[:LONGEST]
            groups.setdefault((label, part.task, part.state_bytes), {}).setdefault((run.lr, run.seed), run)
        order = [*self.own, *(name for name in suite.mixers if name not in self.own)]
        known = sorted({key[0] for key in groups}, key=lambda name: (order.index(name) if name in order else 99, name))
        self.cells = [
            SuiteCell(suite, mixer, task, budget, list(groups[mixer, task, budget].values()))
            for mixer in known
            for task in suite.tasks
            for budget in (None, *suite.state_bytes)
            if (mixer, task, budget) in groups
        ]
        self.mixers = known

    def of(self, mixer: str) -> list[SuiteCell]:
        """The cells of a mixer that have a scored run."""
        return [cell for cell in self.cells if cell.mixer == mixer and cell.scored]

    def values(self, outcome: Outcome = "recall", task: str | None = None) -> dict[str, Groups]:
        """The scores of complete cells with a bounded state, as {mixer: {(task, budget): values}}."""
        found: dict[str, Groups] = {}
        for cell in self.cells:
            if cell.is_complete and cell.budget is not None and task in (None, cell.task):
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
        factors = {name: mixer.factors for name, mixer in self.suite.mixers.items() if mixer.factors}
        values = {name: groups for name, groups in self.values(outcome, task).items() if name in factors}
        return [one for one in main_effects(values, factors) if one.cells]

    def overall(self, mixer: str) -> tuple[float, Interval]:
        """The mean of a ranked mixer over the cells, and its interval over seeds."""
        by_seed = [fmean(values) for values in zip(*self.ranked[mixer].values(), strict=True)]
        return fmean(by_seed), t_interval(by_seed)

    def parameters(self, budget: int | None) -> int | None:
        """The parameters of the first mixer that figures draw, with this size of state: others are given relative to
        it; None if it has no run."""
        own = [cell for cell in self.cells if cell.mixer in self.suite.drawn[:1] and cell.budget == budget]
        return own[0].runs[0].parameters if own else None

    @cached_property
    def sentences(self) -> tuple[str, str, str]:
        """Where the mixer stands, what was decided, and what it would take to decide the rest."""
        ranked = next((name for name in self.own if name in self.places), None)
        if ranked is not None:
            return self._stands(ranked), self._decided(ranked), self._rest(ranked)
        if self.own:
            done = any(cell.is_complete for cell in self.of(self.own[0]))
            rest = "give it a state of a size that can be set" if done else "the same command goes on"
            return self._unranked(self.own[0]), self._effects_in_words(), f"To compare it: {rest}."
        return self._first(), self._effects_in_words(), self._rest(None)

    def _stands(self, name: str) -> str:
        mean, (low, high) = self.overall(name)
        shared = [other for other, place in self.places.items() if place == self.places[name] and other != name]
        span = "" if isnan(low) else f" (95 % interval {low:.2f} to {high:.2f})"
        cells = plural(len(self.ranked[name]), "cell")
        with_them = f", shared with {named(shared)}" if shared else ""
        return (
            f"{name}{self._unequal(name)} recalls {mean:.2f}{span} on average over {cells} of task and state size: "
            f"place {self.places[name]} of {plural(len(self.places), 'mixer')}{with_them}."
        )

    def _unequal(self, name: str) -> str:
        """How many times the parameters of others a mixer has, if they could not be matched."""
        cell = self.of(name)[-1]
        others = self.parameters(cell.budget)
        ratio = cell.runs[0].parameters / others if others else 1.0
        return (
            ""
            if 1 / MATCHED < ratio < MATCHED
            else f", with {ratio:.1f} times the parameters of {self.suite.drawn[0]},"
        )

    def _unranked(self, name: str) -> str:
        found = [f"{cell.mean:.2f} on {cell.task}" for cell in self.of(name)]
        if not found:
            return f"No cell of {name} is finished yet."
        return f"{name} recalls {listed(found)}; it is not ranked: its state has no set size, or no cell is complete."

    def _first(self) -> str:
        if not self.places:
            return "No mixer has a complete cell yet."
        best = [name for name, place in self.places.items() if place == 1]
        what = "alone has" if len(best) == 1 else "share"
        means = [f"{name} ({self.overall(name)[0]:.2f})" for name in best]
        cells = plural(len(self.ranked[best[0]]), "cell")
        count = plural(len(set(self.places.values())), "place")
        return f"{named(means)} {what} the first of {count}, on average over {cells} of task and state size."

    def _decided(self, name: str) -> str:
        mine = [one for one in self.contrasts if name in one[:2]]
        more = [other_of(one, name) for one in mine if one.favours(name)]
        less = [other_of(one, name) for one in mine if one.favours(other_of(one, name))]
        parts = [f"more than {named(more)}"] if more else []
        parts += [f"less than {named(less)}"] if less else []
        if not mine:
            return "No other mixer has these cells."
        if not parts:
            return f"Nothing is decided about it: it differs from none of {plural(len(mine), 'mixer')} by the tests."
        return f"Decided: over all cells it recalls {', and '.join(parts)}."

    def _effects_in_words(self) -> str:
        found = [
            f"{one.a} {one.effect.difference:+.2f} on {task}"
            for task in self.suite.tasks
            for one in self.effects(task)
            if one.is_decided
        ]
        return f"Decided main effects: {listed(found)}." if found else "No main effect is decided."

    def _rest(self, name: str | None) -> str:
        open_ = [one for one in self.contrasts if not one.is_decided and (name is None or name in one[:2])]
        if not open_:
            return "Nothing is left to decide." if self.contrasts else "There is nothing to compare yet."
        seeds, tests = len(self.suite.score_seeds), len(self.contrasts)
        needed = sorted((seeds_to_decide(one, seeds, tests), one) for one in open_)
        able = [(count, one) for count, one in needed if count <= MOST_SEEDS]

        def words(one: Contrast) -> str:
            return f"{one.a} and {one.b}" if name is None else other_of(one, name)

        said = [f"{count:.0f} against {words(one)}" if name else f"{count:.0f} for {words(one)}" for count, one in able]
        beyond = plural(len(open_) - len(able), "comparison")
        if not said:
            return f"To decide the rest: more than {MOST_SEEDS} seeds per cell, for {beyond}; call them equal."
        more = f", and more for {plural(len(said) - NAMED, 'other comparison')}" if len(said) > NAMED else ""
        end = f"; {beyond} would need more than {MOST_SEEDS}" if len(open_) > len(able) else ""
        return f"To decide the rest, instead of {seeds} seeds per cell: about {listed(said[:NAMED])}{more}{end}."

    def to_json(self) -> dict[str, object]:
        """What was found, for --json."""
        return {
            "sentences": list(self.sentences),
            "protocol": self.suite.protocol,
            "places": self.places,
            "left_out": dict(self.left_out),
            "cells": [
                {
                    "mixer": cell.mixer,
                    "task": cell.task,
                    "state_bytes": cell.budget,
                    "rate": cell.rate,
                    "recall": cell.values(),
                    "began": cell.values("began"),
                    "complete": cell.is_complete,
                }
                for cell in self.cells
            ],
            "effects": {task: [describe_contrast(one) for one in self.effects(task)] for task in self.suite.tasks},
        }


def describe_contrast(one: Contrast) -> Mapping[str, object]:
    """A contrast for --json."""
    return {
        "factor": one.a,
        "difference": one.effect.difference,
        "cells": one.cells,
        "p": None if isnan(one.p) else one.p,
    }


def named(names: Sequence[str]) -> str:
    """Some names in a sentence: at most NAMED of them."""
    more = len(names) - NAMED
    return listed(names if more <= 1 else [*names[:NAMED], f"{more} others"])
