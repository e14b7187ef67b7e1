"""Confidence intervals: of a proportion, and of ratios of sums over windows. That of a mean is in spread.py."""

from typing import NamedTuple

import numpy as np

from rebased.analysis.spread import LEVEL, stats

RESAMPLES, SEED = 2000, 0  # a fixed seed: the same values always give the same interval
DRAWS_AT_ONCE = 2**22  # bounds the memory of a bootstrap


class Interval(NamedTuple):
    """The two ends of a confidence interval."""

    low: float
    high: float


def wilson(correct: int, asked: int) -> Interval:
    """Wilson's interval of the proportion correct / asked. It stays within 0 and 1, and has a width even at 0 and 1."""
    if not 0 <= correct <= asked or asked == 0:
        raise ValueError(f"correct must lie between 0 and asked, and asked be at least 1; got {correct} of {asked}")
    found = stats.binomtest(correct, asked).proportion_ci(LEVEL, method="wilson")
    return Interval(float(found.low), float(found.high))


def bootstrap_means(sums: np.ndarray, counts: np.ndarray) -> list[Interval]:
    """95 % bootstrap intervals of sums.sum(0) / counts.sum(0), one per column: sums and counts [W,C] over W windows.

    Windows are drawn with replacement, the same ones for every column. An interval is nan where fewer
    than two windows have tokens.
    """
    windows = len(sums)
    rng = np.random.default_rng(SEED)
    step = max(DRAWS_AT_ONCE // windows, 1)
    means = []
    for first in range(0, RESAMPLES, step):
        drawn = _draw(rng, min(step, RESAMPLES - first), windows)
        with np.errstate(invalid="ignore", divide="ignore"):
            means.append((drawn @ sums) / (drawn @ counts))  # [R,C]; nan where no token was drawn
    tail = (1 - LEVEL) / 2
    found = np.concatenate(means)
    intervals = []
    for column, has_tokens in zip(found.T, (counts > 0).T, strict=True):
        known = column[~np.isnan(column)]
        low, high = np.quantile(known, [tail, 1 - tail]) if has_tokens.sum() > 1 else (np.nan, np.nan)
        intervals.append(Interval(float(low), float(high)))
    return intervals


def _draw(rng: np.random.Generator, times: int, windows: int) -> np.ndarray:
    """[R,W] float64: how often each of W windows is drawn in R = `times` resamples of W windows each."""
    places = rng.integers(windows, size=(times, windows)) + np.arange(times)[:, None] * windows
    return np.bincount(places.ravel(), minlength=times * windows).reshape(times, windows).astype(np.float64)
