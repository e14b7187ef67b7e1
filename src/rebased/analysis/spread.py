"""Mean, standard deviation and confidence interval of a few values."""

from collections.abc import Sequence
from math import isfinite, nan
from statistics import fmean, stdev
from typing import NamedTuple

import numpy as np

try:
    from scipy import stats
except ImportError as error:
    raise ImportError("statistics need scipy, which is not installed: pip install 'rebased[lab]'") from error

RESAMPLES, SEED = 9999, 0  # a fixed seed: the same values always give the same interval
LEVEL = 0.95
FEWEST = 3  # values that an interval needs: two say next to nothing about their own spread


class Spread(NamedTuple):
    """A few values, summarised."""

    n: int
    mean: float
    sd: float  # of the sample (ddof 1); nan for one value
    low: float  # ends of the 95 % bootstrap interval of the mean (BCa); nan for fewer than three values
    high: float


def describe(values: Sequence[float]) -> Spread:
    """The mean of one or more finite values, their standard deviation, and an interval of the mean."""
    if not values:
        raise ValueError("there is nothing to describe; give at least one value")
    if not all(isfinite(value) for value in values):
        raise ValueError(f"every value must be a finite number; got {list(values)}")
    if len(values) == 1:
        return Spread(1, values[0], nan, nan, nan)
    low, high = bootstrap_interval(values) if len(values) >= FEWEST else (nan, nan)
    return Spread(len(values), fmean(values), stdev(values), low, high)


def bootstrap_interval(values: Sequence[float]) -> tuple[float, float]:
    """(low, high) of the 95 % BCa bootstrap interval of the mean, which corrects for skew.

    For a handful of values every bootstrap interval is a little too short.
    """
    if max(values) == min(values):
        return values[0], values[0]
    interval = stats.bootstrap(
        (np.asarray(values),),
        np.mean,
        n_resamples=RESAMPLES,
        confidence_level=LEVEL,
        rng=np.random.default_rng(SEED),
        vectorized=True,
    ).confidence_interval
    return float(interval.low), float(interval.high)
