"""Expected validation performance: the best accuracy to expect from a given number of tuning trials."""

from collections.abc import Sequence
from math import comb, isfinite


def expected_validation_performance(values: Sequence[float], replacement: bool = True) -> list[float]:
    """The expected maximum of m values drawn at random from the M `values`, for m = 1 to M.

    `values` has one number per setting, such as the mean over seeds at each learning rate. With `replacement` a setting
    may be drawn more than once, as if the grid were a distribution; without, the m settings differ.
    """
    ordered = sorted(values)
    if not ordered:
        raise ValueError("there is no value to choose the best of; give the accuracy of at least one setting")
    if not all(isfinite(value) for value in ordered):
        raise ValueError(f"every value must be a finite number; got {list(values)} (a run that diverged counts as 0)")
    total = len(ordered)

    def chance(i: int, budget: int) -> float:
        """The probability that the i-th smallest value, counted from 1, is the best of `budget` drawn."""
        if replacement:
            return (i / total) ** budget - ((i - 1) / total) ** budget
        return comb(i - 1, budget - 1) / comb(total, budget)

    return [
        sum(value * chance(i, budget) for i, value in enumerate(ordered, start=1)) for budget in range(1, total + 1)
    ]
