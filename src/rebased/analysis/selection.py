"""Choose the learning rate of a model by the paper's rule: the best mean over seeds."""

from collections.abc import Mapping
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
