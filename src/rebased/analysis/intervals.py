"""How far a measured number may lie from the true one: a share of right answers, a quotient of sums, a mean."""

from collections.abc import Sequence
from math import nan, sqrt
from statistics import fmean, stdev
from typing import NamedTuple

import numpy as np

from rebased.analysis.spread import LEVEL, SEED, stats

RESAMPLES = 2000
AT_ONCE = 2**22  # draws in memory


class Interval(NamedTuple):
    low: float
    high: float


def wilson(correct: int, asked: int, level: float = LEVEL) -> Interval:
    """Of a share, Wilson's: it stays within 0 and 1, and is not empty where all answers or none were right."""
    if not 0 <= correct <= asked or asked == 0:
        raise ValueError(f"correct must lie between 0 and asked, and asked be at least 1; got {correct} of {asked}")
    found = stats.binomtest(correct, asked).proportion_ci(level, method="wilson")
    return Interval(float(found.low), float(found.high))


def t_interval(values: Sequence[float], level: float = LEVEL) -> Interval:
    """Of the mean of a few values that scatter about it evenly, such as results of seeds; Student's. nan for one."""
    if len(values) < 2:
        return Interval(nan, nan)
    half = float(stats.t.ppf((1 + level) / 2, len(values) - 1)) * stdev(values) / sqrt(len(values))
    return Interval(fmean(values) - half, fmean(values) + half)


def bootstrap_means(sums: np.ndarray, counts: np.ndarray, level: float = LEVEL) -> list[Interval]:
    """Of total / count, column by column, over windows [W,C]: windows are drawn again with replacement, and every
    column sees the same draws. nan where one window, or no token, says nothing about others."""
    windows, columns = sums.shape
    if windows < 2:
        return [Interval(np.nan, np.nan)] * columns
    rng = np.random.default_rng(SEED)
    step = max(AT_ONCE // windows, 1)
    means = []
    for first in range(0, RESAMPLES, step):
        drawn = _draw(rng, min(step, RESAMPLES - first), windows)
        with np.errstate(invalid="ignore", divide="ignore"):
            means.append((drawn @ sums) / (drawn @ counts))  # [R,C]; nan where no token was drawn
    tail = (1 - level) / 2
    found = np.concatenate(means)
    intervals = []
    for column in found.T:
        told = column[~np.isnan(column)]
        low, high = np.quantile(told, [tail, 1 - tail]) if len(told) else (np.nan, np.nan)
        intervals.append(Interval(float(low), float(high)))
    return intervals


def _draw(rng: np.random.Generator, times: int, windows: int) -> np.ndarray:
    """[R,W]: how often each window comes when as many as there are, W, are drawn; R times over."""
    places = rng.integers(windows, size=(times, windows)) + np.arange(times)[:, None] * windows
    return np.bincount(places.ravel(), minlength=times * windows).reshape(times, windows).astype(np.float64)
