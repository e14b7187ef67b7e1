"""Choose a learning rate by the paper's rule, the best mean over seeds; and what to expect of so many tries."""

from collections.abc import Mapping, Sequence
from math import comb, isfinite
from statistics import fmean
from typing import NamedTuple


class Choice(NamedTuple):
    """A learning rate and how it was chosen."""

    lr: float
    mean: float  # accuracy over seeds, by which it was chosen
    tried: int  # learning rates compared
    left_out: tuple[float, ...]  # rates with fewer seeds than others, not compared: their means could be luck
    staged: tuple[int, ...] = ()  # seeds that all rates have, on which the same rule chooses it; () if none is left out


def choose_lr(accuracies: Mapping[float, Mapping[int, float]]) -> Choice:
    """The learning rate with the best mean of `accuracies[lr][seed]`; the smallest of equally good ones.

    The accuracies must be of the validation split. Only rates with the largest number of seeds are compared.
    """
    counts = {lr: len(seeds) for lr, seeds in accuracies.items() if seeds}
    if not counts:
        raise ValueError("there is no accuracy to choose a learning rate by; give at least one run")
    complete = max(counts.values())
    means = {lr: fmean(accuracies[lr].values()) for lr in sorted(counts) if counts[lr] == complete}
    best = max(means, key=lambda lr: means[lr])  # the first of equal ones
    left_out = tuple(lr for lr in sorted(counts) if counts[lr] < complete)
    return Choice(best, means[best], len(means), left_out, _staged(accuracies, best) if left_out else ())


def _staged(accuracies: Mapping[float, Mapping[int, float]], best: float) -> tuple[int, ...]:
    """The seeds that all rates have, if `best` has the best mean over them, the smallest of equally good ones; else ().

    This is what a search in stages leaves: all rates with the first seeds, the best one with the other seeds too.
    """
    tried = {lr: seeds for lr, seeds in accuracies.items() if seeds}
    common = sorted(set.intersection(*(set(seeds) for seeds in tried.values())))
    if not common:
        return ()
    means = {lr: fmean(tried[lr][seed] for seed in common) for lr in sorted(tried)}
    return tuple(common) if best == max(means, key=lambda lr: means[lr]) else ()


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
