"""Places of models that were trained on several cells, and main effects of what distinguishes them.

A cell, such as a task with one size of state, is a stratum: runs are exchanged between models within it.
"""

from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations
from math import ceil, inf, isnan, nan
from statistics import NormalDist
from typing import NamedTuple

from rebased.analysis.paired import SIGNIFICANT, holm
from rebased.analysis.unpaired import Effect, Groups, effect, permutation_interval, permutation_p

POWER = 0.8  # with which a further comparison should find a difference
NONE = Effect(nan, nan, nan, 0, 0)


class Contrast(NamedTuple):
    """Two models, or two levels of a factor, on the cells that both have."""

    a: str
    b: str
    effect: Effect  # of a minus b
    cells: int
    p: float  # of the permutation test, after Holm's correction; nan if there is nothing to compare
    interval: tuple[float, float] = (nan, nan)  # that belongs to the test, without correction; of main effects only

    @property
    def is_decided(self) -> bool:
        """True if p is below SIGNIFICANT."""
        return self.p < SIGNIFICANT

    def favours(self, name: str) -> bool:
        """True if this model or level is decidedly better than the other one."""
        return self.is_decided and name == (self.a if self.effect.difference > 0 else self.b)


def contrast_all(pairs: Mapping[tuple[str, str], tuple[Groups, Groups]]) -> list[Contrast]:
    """Compare the two groups of each pair, named (a, b), on the cells that both have; Holm over all pairs."""
    found = []
    for (a, b), (one, other) in pairs.items():
        cells = [cell for cell in one if other.get(cell) and one[cell]]
        ours, theirs = ({cell: group[cell] for cell in cells} for group in (one, other))
        known = bool(cells) and any(len(group[cell]) > 1 for group in (ours, theirs) for cell in cells)
        p = permutation_p(ours, theirs) if known else nan
        found.append(Contrast(a, b, effect(ours, theirs) if cells else NONE, len(cells), p))
    corrected = holm([one.p for one in found])
    return [one._replace(p=p) for one, p in zip(found, corrected, strict=True)]


def compare_pairs(values: Mapping[str, Groups]) -> list[Contrast]:
    """Every two models, given as {model: {cell: values}}; Holm over all pairs."""
    return contrast_all({(a, b): (values[a], values[b]) for a, b in combinations(values, 2)})


def places(names: Sequence[str], contrasts: Sequence[Contrast]) -> dict[str, int]:
    """The place of each model: 1 + the number of models that are decidedly better. Without a decided difference all
    share the first place, whatever their means are."""
    return {name: 1 + sum(one.favours(other_of(one, name)) for one in contrasts if name in one[:2]) for name in names}


def other_of(contrast: Contrast, name: str) -> str:
    """The other model of a contrast."""
    return contrast.b if name == contrast.a else contrast.a


def main_effects(values: Mapping[str, Groups], factors: Mapping[str, Mapping[str, bool]]) -> list[Contrast]:
    """Each factor with against without, over all pairs of models that differ in it alone; Holm over the factors.

    values[model][cell] are one value per run. factors[model] are its factors: {"square": True, "gate": False}. Each
    pair of models on each cell is a stratum.
    """
    known = {name: factors.get(name, {}) for name in values}
    found: dict[tuple[str, str], tuple[Groups, Groups]] = {}
    for factor in dict.fromkeys(factor for own in known.values() for factor in own):
        strata = [(a, b, cell) for a, b in which_differ_in(factor, known) for cell in values[a] if cell in values[b]]
        ours: dict[Hashable, Sequence[float]] = {(a, b, cell): values[a][cell] for a, b, cell in strata}
        theirs: dict[Hashable, Sequence[float]] = {(a, b, cell): values[b][cell] for a, b, cell in strata}
        found[factor, f"no {factor}"] = ours, theirs
    return [
        one if isnan(one.p) else one._replace(interval=permutation_interval(*found[one.a, one.b]))
        for one in contrast_all(found)
    ]


def which_differ_in(factor: str, factors: Mapping[str, Mapping[str, bool]]) -> list[tuple[str, str]]:
    """All pairs of models (with, without) that differ in this factor alone."""
    without = [name for name, known in factors.items() if known.get(factor) is False]
    return [(a, b) for a in factors for b in without if factors[a] == {**factors[b], factor: True}]


def seeds_to_decide(contrast: Contrast, seeds: int, tests: int) -> float:
    """About how many seeds per cell would decide a contrast of `seeds` seeds, if its difference is the true one:
    after Holm's strictest correction over `tests` tests, with a power of POWER. inf if there is no difference."""
    found = contrast.effect
    if isnan(found.error) or found.difference == 0:
        return inf
    normal = NormalDist()
    wanted = normal.inv_cdf(1 - SIGNIFICANT / 2 / tests) + normal.inv_cdf(POWER)
    return max(seeds + 1, ceil(seeds * (wanted * found.error / found.difference) ** 2))
