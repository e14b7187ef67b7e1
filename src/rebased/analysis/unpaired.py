"""Compare two groups of runs that share no seeds: a difference with its interval, equivalence, and exact tests."""

from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache
from math import ceil, inf, nan, sqrt
from statistics import fmean, variance
from typing import NamedTuple

import numpy as np

from rebased.analysis.spread import LEVEL, stats

ALPHA = 0.05
SHUFFLES, SEED = 20_000, 0  # a fixed seed: the same values always give the same p
Groups = Mapping[Hashable, Sequence[float]]
"""Values of one model by stratum, such as its widths; within a stratum they are one per run."""


class Effect(NamedTuple):
    """The difference of two means, a - b, averaged over strata."""

    difference: float
    error: float  # its standard error
    freedom: float  # degrees of freedom, by Welch and Satterthwaite
    n_a: int
    n_b: int

    def interval(self, level: float = LEVEL) -> tuple[float, float]:
        """The two ends of Student's interval; nan if a group has one value only."""
        half = float(stats.t.ppf((1 + level) / 2, self.freedom)) * self.error
        return self.difference - half, self.difference + half

    @property
    def width(self) -> float:
        """The width of the 90 % interval, which decides about equivalence."""
        low, high = self.interval(1 - 2 * ALPHA)
        return high - low

    @property
    def p(self) -> float:
        """The two-sided p of Welch's t test."""
        if self.error == 0:
            return nan if self.difference else 1.0
        return float(2 * stats.t.sf(abs(self.difference) / self.error, self.freedom))

    def equivalence_p(self, margin: float) -> float:
        """The greater p of two one-sided t tests: that the difference is above -margin, and below margin."""
        room = margin - abs(self.difference)
        if self.error == 0:
            return 0.0 if room > 0 else 1.0
        return float(stats.t.sf(room / self.error, self.freedom))

    def is_within(self, margin: float) -> bool:
        """True if the difference is smaller than the margin, by two one-sided tests: the 90 % interval lies inside."""
        return self.equivalence_p(margin) < ALPHA


def effect(a: Groups, b: Groups) -> Effect:
    """a - b, the mean over strata of the difference of means. Both must have the same strata, none of them empty."""
    difference = _difference(a, b)
    parts = [(len(values), values) for group in (a, b) for values in group.values()]
    sizes = sum(map(len, a.values())), sum(map(len, b.values()))
    if any(n < 2 for n, _ in parts):
        return Effect(difference, nan, nan, *sizes)
    return Effect(difference, *_welch([(variance(values) / n / len(a) ** 2, n) for n, values in parts]), *sizes)


def _difference(a: Groups, b: Groups) -> float:
    if a.keys() != b.keys() or not a:
        raise ValueError(f"both groups need the same strata; got {sorted(map(str, a))} and {sorted(map(str, b))}")
    return fmean(fmean(a[key]) - fmean(b[key]) for key in a)


def effect_of(mean: float, sd: float, n: int, other: float, other_sd: float, other_n: int) -> Effect:
    """The difference of two means, from means, standard deviations and sample sizes."""
    return Effect(mean - other, *_welch([(sd**2 / n, n), (other_sd**2 / other_n, other_n)]), n, other_n)


def _welch(errors: Sequence[tuple[float, int]]) -> tuple[float, float]:
    """(standard error, degrees of freedom) of a sum of means, each with its squared error and number of values."""
    total = sum(error for error, _ in errors)
    spread = sum(error**2 / (n - 1) for error, n in errors if n > 1)
    return sqrt(total), total**2 / spread if spread else inf


def permutation_p(a: Groups, b: Groups) -> float:
    """The two-sided p of the difference `effect` computes, if runs are exchanged between a and b within each stratum.

    Labels are shuffled SHUFFLES times. The observed order counts as one more, so p is never 0.
    """
    observed = abs(_difference(a, b))
    return float((1 + np.sum(np.abs(_shuffled(a, b)) >= observed - 1e-12)) / (1 + SHUFFLES))


def permutation_interval(a: Groups, b: Groups, level: float = LEVEL) -> tuple[float, float]:
    """The interval that belongs to `permutation_p`: all shifts of a against b that the test does not reject.

    It excludes 0 exactly where p < 1 - level. Too few runs reject nothing, and both ends are infinite.
    """
    observed, found = _difference(a, b), _shuffled(a, b)
    # By how much a shuffled difference grows if a grows by 1. In the observed order it is 1.
    share = _shuffled({key: [1.0] * len(a[key]) for key in a}, {key: [0.0] * len(b[key]) for key in a})
    with np.errstate(divide="ignore", invalid="ignore"):  # a shuffle is as extreme at all shifts between two ends
        ends = np.array([(observed - found) / (1 - share), (observed + found) / (1 + share)])
    same = 1 - np.abs(share) < 1e-9  # the observed groups again: as extreme at every shift
    kept = ceil((1 - level) * (1 + SHUFFLES)) - 1  # so many shuffles, with the observed order, are just not rejected
    low = np.sort(np.where(same, -inf, ends.min(0)))[kept - 1]
    high = np.sort(np.where(same, inf, ends.max(0)))[-kept]
    return float(low), float(high)


def _shuffled(a: Groups, b: Groups) -> np.ndarray:
    """The difference after each shuffle: [SHUFFLES]."""
    pools, found = [np.array([*a[key], *b[key]]) for key in a], np.zeros(SHUFFLES)
    for pool, order, values in zip(pools, _orders(tuple(map(len, pools))), a.values(), strict=True):
        shuffled, n = pool.take(order), len(values)  # [runs, SHUFFLES]
        found += (shuffled[:n].mean(0) - shuffled[n:].mean(0)) / len(a)
    return found


@lru_cache(maxsize=4)  # a ranking compares many pairs of the same sizes
def _orders(sizes: tuple[int, ...]) -> list[np.ndarray]:
    """SHUFFLES random orders of the runs of each stratum, by their numbers: [runs, SHUFFLES] per stratum."""
    rng = np.random.default_rng(SEED)
    orders = (rng.permuted(np.tile(np.arange(size), (SHUFFLES, 1)), axis=1) for size in sizes)
    return [np.ascontiguousarray(order.T) for order in orders]  # sums over runs are many times as fast in this order


def fisher_p(yes_a: int, n_a: int, yes_b: int, n_b: int) -> float:
    """The two-sided p of Fisher's exact test that the shares yes_a / n_a and yes_b / n_b are equal."""
    return float(stats.fisher_exact([[yes_a, n_a - yes_a], [yes_b, n_b - yes_b]]).pvalue)
