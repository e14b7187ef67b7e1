"""Two models on the same seeds: tests of the paired differences, how large they are, and what that means in words."""

from collections.abc import Mapping, Sequence
from math import comb, inf, isnan, nan, sqrt
from statistics import fmean, stdev
from typing import NamedTuple

from rebased.analysis.spread import Spread, describe, stats

SIGNIFICANT = 0.05
DIGITS = 12  # differences are rounded to so many: 0.3 - 0.2 and 0.2 - 0.1 are equal, and tie in rank


class Comparison(NamedTuple):
    """Of model a with model b; differences are a - b."""

    seeds: tuple[int, ...]  # those that both have
    unpaired: int  # runs whose seed the other model lacks: they are left out
    difference: Spread
    t_p: float  # paired t test, two-sided; nan where it says nothing: one pair, or no spread
    wilcoxon_p: float  # signed-rank test, two-sided, exact for up to 50 pairs without ties; nan for one pair
    d: float  # Cohen's, of the paired differences: mean / sd
    rank_biserial: float  # from -1 (every difference favours b) over 0 to 1 (every one favours a)
    t_holm: float  # the p values after Holm's correction for all comparisons of `compare_all`; alone there is nothing
    wilcoxon_holm: float  # to correct for, and they are t_p and wilcoxon_p


def compare(a: Mapping[int, float], b: Mapping[int, float]) -> Comparison:
    """`a` and `b` are accuracies by seed. Only seeds of both count."""
    seeds = tuple(sorted(a.keys() & b.keys()))
    if not seeds:
        raise ValueError(f"no seed is in both: {sorted(a)} and {sorted(b)}; paired tests need the same seeds")
    differences = [round(a[seed] - b[seed], DIGITS) for seed in seeds]
    difference = describe(differences)
    t_p, wilcoxon_p, d = nan, nan, nan
    if len(seeds) > 1:
        t_p, d = paired_t(differences)
        wilcoxon_p = signed_rank(differences)
    unpaired = len(a.keys() ^ b.keys())
    ranks = rank_biserial(differences)
    return Comparison(seeds, unpaired, difference, t_p, wilcoxon_p, d, ranks, t_holm=t_p, wilcoxon_holm=wilcoxon_p)


def paired_t(differences: Sequence[float]) -> tuple[float, float]:
    """(p, Cohen's d) of two or more differences. All zero: p = 1; all equal otherwise: t is not defined."""
    mean, sd = fmean(differences), stdev(differences)
    if sd == 0:
        return (1.0, 0.0) if mean == 0 else (nan, inf if mean > 0 else -inf)
    t = mean / (sd / sqrt(len(differences)))
    return float(2 * stats.t.sf(abs(t), len(differences) - 1)), mean / sd


def signed_rank(differences: Sequence[float]) -> float:
    """Wilcoxon's two-sided p. Zeros say nothing and are left out, as Wilcoxon did; all zero: p = 1."""
    decided = [difference for difference in differences if difference]
    return float(stats.wilcoxon(decided, method="auto").pvalue) if decided else 1.0


def sign_test(positive: int, negative: int) -> float:
    """The two-sided p of so many positive and negative differences, if either sign were equally likely.

    Differences of zero are not counted. Without any difference p is 1.
    """
    pairs, most = positive + negative, max(positive, negative)
    return min(1.0, 2 * sum(comb(pairs, n) for n in range(most, pairs + 1)) / 2**pairs)


def smallest_wilcoxon_p(pairs: int) -> float:
    """What the test gives when every one of so many differences has the same sign: it cannot give less."""
    return 2.0 ** (1 - pairs)


def rank_biserial(differences: Sequence[float]) -> float:
    """The share of the rank sum that favours a, less that which favours b."""
    decided = [difference for difference in differences if difference]
    if not decided:
        return 0.0
    ranks = stats.rankdata([abs(difference) for difference in decided])
    signed = sum(rank if difference > 0 else -rank for rank, difference in zip(ranks, decided, strict=True))
    return float(signed / ranks.sum())


def holm(p_values: Sequence[float]) -> list[float]:
    """Corrected for asking so many questions at once (Holm's step-down). A nan was no question and stays nan."""
    asked = sorted((p, i) for i, p in enumerate(p_values) if not isnan(p))
    corrected, running = [nan] * len(p_values), 0.0
    for rank, (p, i) in enumerate(asked):
        running = max(running, min(1.0, (len(asked) - rank) * p))
        corrected[i] = running
    return corrected


def compare_all(pairs: Sequence[tuple[Mapping[int, float], Mapping[int, float]]]) -> list[Comparison]:
    """One family of comparisons, corrected together, each kind of test for itself."""
    found = [compare(a, b) for a, b in pairs]
    corrections = zip(holm([one.t_p for one in found]), holm([one.wilcoxon_p for one in found]), strict=True)
    return [one._replace(t_holm=t, wilcoxon_holm=w) for one, (t, w) in zip(found, corrections, strict=True)]


class Verbs(NamedTuple):
    """How a sentence says that the values of one model are greater, smaller or equal."""

    greater: str = "recalls more than"
    smaller: str = "recalls less than"
    equal: str = "recall equally much"


def in_words(a: str, b: str, found: Comparison, verbs: Verbs = Verbs()) -> str:  # noqa: B008 (it cannot change)
    """One sentence that claims no more than the tests support."""
    n, mean, sd = found.difference.n, found.difference.mean, found.difference.sd
    if n == 1:
        return f"{a} and {b} differ by {mean:+.3f} on one paired seed: one pair can be put to no test."
    if found.difference.mean == 0 and sd == 0:
        return f"{a} and {b} {verbs.equal} on each of {n} paired seeds."
    by = f"by {abs(mean):.3f} ± {sd:.3f} on {n} paired seeds"
    if isnan(found.t_p):
        return f"{a} and {b} differ {by}, alike on every seed: without spread the t test says nothing."
    numbers = f"(Holm p {equals(found.t_holm)}, d = {found.d:.1f})"
    if found.t_holm < SIGNIFICANT:
        return f"{a} {verbs.greater if mean > 0 else verbs.smaller} {b} {by} {numbers}."
    return f"Between {a} and {b} these seeds do not decide: they differ {by} {numbers}."


def wilcoxon_limit(pairs: int) -> str | None:
    """Said where so few pairs cannot reach significance, however they fall."""
    smallest = smallest_wilcoxon_p(pairs)
    if pairs < 2 or smallest < SIGNIFICANT:
        return None
    return (
        f"With {pairs} pairs Wilcoxon's test cannot reach {SIGNIFICANT:g}: its smallest two-sided p is {smallest:g}, "
        "when all differences have one sign. What is called a difference here rests on the t test."
    )


def equals(p: float) -> str:
    if isnan(p):
        return "undefined"
    return "< 0.001" if p < 0.001 else f"= {p:.2g}"
