"""Compare two models on the same seeds: paired tests, effect sizes, and a sentence that states the result."""

from collections.abc import Mapping, Sequence
from math import inf, isnan, nan, sqrt
from statistics import fmean, stdev
from typing import NamedTuple

from rebased.analysis.spread import Spread, describe, stats

SIGNIFICANT = 0.05
DIGITS = 12  # differences are rounded to so many decimals, so that 0.3 - 0.2 and 0.2 - 0.1 have the same rank


class Comparison(NamedTuple):
    """Model a against model b; differences are a - b."""

    seeds: tuple[int, ...]  # that both models have
    unpaired: int  # values left out because the other model lacks their seed
    difference: Spread
    t_p: float  # p of the paired t test, two-sided; nan for one pair, or if all differences are equal and not 0
    wilcoxon_p: float  # p of the signed-rank test, two-sided, exact for up to 50 pairs without ties; nan for one pair
    d: float  # Cohen's d of the paired differences: mean / sd
    rank_biserial: float  # from -1 (every difference favours b) to 1 (every difference favours a)
    t_holm: float  # t_p after Holm's correction over all comparisons of `compare_all`; from `compare`, t_p itself
    wilcoxon_holm: float  # wilcoxon_p, corrected in the same way


def compare(a: Mapping[int, float], b: Mapping[int, float]) -> Comparison:
    """Compare two models, given as {seed: accuracy}. Only seeds that both have count."""
    seeds = tuple(sorted(a.keys() & b.keys()))
    if not seeds:
        raise ValueError(f"no seed is in both: {sorted(a)} and {sorted(b)}; paired tests need the same seeds")
    differences = [round(a[seed] - b[seed], DIGITS) for seed in seeds]
    difference = describe(differences)
    t_p, d = paired_t(differences) if len(seeds) > 1 else (nan, nan)
    wilcoxon_p = signed_rank(differences) if len(seeds) > 1 else nan
    unpaired, ranks = len(a.keys() ^ b.keys()), rank_biserial(differences)
    return Comparison(seeds, unpaired, difference, t_p, wilcoxon_p, d, ranks, t_holm=t_p, wilcoxon_holm=wilcoxon_p)


def paired_t(differences: Sequence[float]) -> tuple[float, float]:
    """(two-sided p of the t test, Cohen's d) of two or more differences.

    If all are zero, p is 1 and d is 0. If all have one other value, t is not defined: p is nan and d infinite.
    """
    mean, sd = fmean(differences), stdev(differences)
    if sd == 0:
        return (1.0, 0.0) if mean == 0 else (nan, inf if mean > 0 else -inf)
    t = mean / (sd / sqrt(len(differences)))
    return float(2 * stats.t.sf(abs(t), len(differences) - 1)), mean / sd


def signed_rank(differences: Sequence[float]) -> float:
    """Two-sided p of Wilcoxon's signed-rank test. Zeros are left out, as Wilcoxon did; if all are zero, p is 1."""
    decided = [difference for difference in differences if difference]
    return float(stats.wilcoxon(decided, method="auto").pvalue) if decided else 1.0


def smallest_wilcoxon_p(pairs: int) -> float:
    """The smallest p that Wilcoxon's test can give for `pairs` pairs: all differences have the same sign."""
    return 2.0 ** (1 - pairs)


def rank_biserial(differences: Sequence[float]) -> float:
    """The positive differences' share of the rank sum minus that of the negative ones, -1 to 1. Zeros are left out."""
    decided = [difference for difference in differences if difference]
    if not decided:
        return 0.0
    ranks = stats.rankdata([abs(difference) for difference in decided])
    signed = sum(rank if difference > 0 else -rank for rank, difference in zip(ranks, decided, strict=True))
    return float(signed / ranks.sum())


def holm(p_values: Sequence[float]) -> list[float]:
    """p values corrected for multiple tests by Holm's step-down method. A nan is no test and stays nan."""
    tests = sorted((p, i) for i, p in enumerate(p_values) if not isnan(p))
    corrected, running = [nan] * len(p_values), 0.0
    for rank, (p, i) in enumerate(tests):
        running = max(running, min(1.0, (len(tests) - rank) * p))
        corrected[i] = running
    return corrected


def compare_all(pairs: Sequence[tuple[Mapping[int, float], Mapping[int, float]]]) -> list[Comparison]:
    """Compare each pair of models and correct the p values over all pairs, for each kind of test separately."""
    found = [compare(a, b) for a, b in pairs]
    corrections = zip(holm([one.t_p for one in found]), holm([one.wilcoxon_p for one in found]), strict=True)
    return [one._replace(t_holm=t, wilcoxon_holm=w) for one, (t, w) in zip(found, corrections, strict=True)]


class Verbs(NamedTuple):
    """How a sentence says that the values of one model are greater, smaller or equal."""

    greater: str = "recalls more than"
    smaller: str = "recalls less than"
    equal: str = "recall equally much"


RECALL = Verbs()


def in_words(a: str, b: str, found: Comparison, verbs: Verbs = RECALL) -> str:
    """One sentence that states what the tests of models named `a` and `b` show, and no more."""
    n, mean, sd = found.difference.n, found.difference.mean, found.difference.sd
    if n == 1:
        return f"{a} and {b} differ by {mean:+.3f} on one paired seed: one pair can be put to no test."
    if found.difference.mean == 0 and sd == 0:
        return f"{a} and {b} {verbs.equal} on each of {n} paired seeds."
    by = f"by {abs(mean):.3f} ± {sd:.3f} on {n} paired seeds"
    if isnan(found.t_p):
        return f"{a} and {b} differ {by}, alike on every seed: without spread the t test says nothing."
    numbers = f"(Holm p {equals(found.t_holm)}, d = {found.d:.1f})"
    undecided = "" if found.t_holm < SIGNIFICANT else "Undecided: "
    return f"{undecided}{a} {verbs.greater if mean > 0 else verbs.smaller} {b} {by} {numbers}."


def wilcoxon_limit(pairs: int) -> str | None:
    """A warning that so few pairs can never reach significance in Wilcoxon's test; None if they can."""
    smallest = smallest_wilcoxon_p(pairs)
    if pairs < 2 or smallest < SIGNIFICANT:
        return None
    return (
        f"With {pairs} pairs Wilcoxon's test cannot reach {SIGNIFICANT:g}: its smallest two-sided p is {smallest:g}, "
        "when all differences have one sign. What is called a difference here rests on the t test."
    )


def equals(p: float) -> str:
    """A p value as text that follows the letter p: "= 0.012", "< 0.001" or "undefined"."""
    if isnan(p):
        return "undefined"
    return "< 0.001" if p < 0.001 else f"= {p:.2g}"
