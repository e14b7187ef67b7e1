"""Which learning rate stands for a model: the paper's rule, the best mean over seeds."""

from collections.abc import Mapping
from statistics import fmean
from typing import NamedTuple


class Choice(NamedTuple):
    lr: float
    mean: float  # of the accuracies that it was chosen by
    tried: int
    left_out: tuple[float, ...]  # rates that have fewer seeds than others: their means could be luck


def choose_lr(accuracies: Mapping[float, Mapping[int, float]]) -> Choice:
    """`accuracies[lr][seed]`, on the split that may be chosen on. Of equally good rates the smallest.

    Only rates with as many seeds as the best covered one can be chosen.
    """
    counts = {lr: len(seeds) for lr, seeds in accuracies.items() if seeds}
    if not counts:
        raise ValueError("there is no accuracy to choose a learning rate by; give at least one run")
    complete = max(counts.values())
    means = {lr: fmean(accuracies[lr].values()) for lr in sorted(counts) if counts[lr] == complete}
    best = max(means, key=lambda lr: means[lr])  # the first of equals
    return Choice(best, means[best], len(means), tuple(lr for lr in sorted(counts) if counts[lr] < complete))
