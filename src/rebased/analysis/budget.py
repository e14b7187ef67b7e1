"""Expected validation performance: the best accuracy that a budget of so many tries would have found."""

from collections.abc import Sequence
from math import comb, isfinite


def expected_validation_performance(values: Sequence[float], replacement: bool = True) -> list[float]:
    """The expected best of m settings drawn at random from the M that were tried, for m = 1 to M.

    `values` holds one number a setting, such as the mean over seeds at each learning rate. With `replacement` a setting
    may be drawn again, as if the grid stood for a distribution; without, m different settings are tried.
    """
    ordered = sorted(values)
    if not ordered:
        raise ValueError("there is no value to choose the best of; give the accuracy of at least one setting")
    if not all(isfinite(value) for value in ordered):
        raise ValueError(f"every value must be a finite number; got {list(values)} (a run that diverged counts as 0)")
    total = len(ordered)

    def chance(i: int, budget: int) -> float:
        """That the i-th smallest value, counted from 1, is the best of those drawn."""
        if replacement:
            return (i / total) ** budget - ((i - 1) / total) ** budget
        return comb(i - 1, budget - 1) / comb(total, budget)

    return [
        sum(value * chance(i, budget) for i, value in enumerate(ordered, start=1)) for budget in range(1, total + 1)
    ]
