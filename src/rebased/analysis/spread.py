"""Mean, standard deviation and confidence interval of a few values."""

from collections.abc import Sequence
from math import isfinite, nan, sqrt
from statistics import fmean, stdev
from typing import NamedTuple

try:
    from scipy import stats
except ImportError as error:
    raise ImportError("statistics need scipy, which is not installed: pip install 'rebased[lab]'") from error

LEVEL = 0.95
FEWEST = 3  # values that an interval needs: two say next to nothing about their own spread


class Spread(NamedTuple):
    """A few values, summarised."""

    n: int
    mean: float
    sd: float  # of the sample (ddof 1); nan for one value
    low: float  # ends of Student's 95 % interval of the mean; nan for fewer than three values, or if all are equal
    high: float


def describe(values: Sequence[float]) -> Spread:
    """The mean of one or more finite values, their standard deviation, and an interval of the mean."""
    if not values:
        raise ValueError("there is nothing to describe; give at least one value")
    if not all(isfinite(value) for value in values):
        raise ValueError(f"every value must be a finite number; got {list(values)}")
    if len(values) == 1:
        return Spread(1, values[0], nan, nan, nan)
    sd = stdev(values)
    low, high = student_interval(values) if sd > 0 else (nan, nan)
    return Spread(len(values), fmean(values), sd, low, high)


def student_interval(values: Sequence[float], level: float = LEVEL) -> tuple[float, float]:
    """(low, high) of Student's interval of the mean; nan for fewer than three values.

    It excludes 0 exactly where the t test has p < 1 - level. A bootstrap of so few values would be too narrow.
    """
    if len(values) < FEWEST:
        return nan, nan
    half = float(stats.t.ppf((1 + level) / 2, len(values) - 1)) * stdev(values) / sqrt(len(values))
    return fmean(values) - half, fmean(values) + half
