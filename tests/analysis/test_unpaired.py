"""Differences between two groups of runs, beside scipy; equivalence; permutations; Fisher's test."""

from math import isnan

import numpy as np
import pytest
from scipy import stats

from rebased.analysis.unpaired import Groups, effect, effect_of, fisher_p, permutation_interval, permutation_p

A, B = [0.58, 0.66, 0.67, 0.57, 0.40], [0.47, 0.48, 0.55, 0.18, 0.37]


def test_one_stratum_is_welchs_test() -> None:
    found, scipy = effect({0: A}, {0: B}), stats.ttest_ind(A, B, equal_var=False)
    interval = scipy.confidence_interval()
    assert found.p == pytest.approx(scipy.pvalue)
    assert found.interval() == pytest.approx((interval.low, interval.high))
    summary = effect_of(np.mean(A), np.std(A, ddof=1), 5, np.mean(B), np.std(B, ddof=1), 5)
    assert tuple(summary) == pytest.approx(tuple(found))


def test_equivalence_needs_a_narrow_interval_inside_the_margin() -> None:
    """Equal means that are far apart from run to run are not equivalent, nor is a difference as large as the margin."""
    narrow, wide = [0.50, 0.51, 0.49, 0.50, 0.50], [0.1, 0.9, 0.5, 0.2, 0.8]
    assert effect({0: narrow}, {0: narrow}).is_within(0.1)
    assert not effect({0: wide}, {0: wide}).is_within(0.1)
    shifted = effect({0: [value + 0.1 for value in narrow]}, {0: narrow})
    assert not shifted.is_within(0.1)
    assert shifted.is_within(0.2)
    low, high = effect({0: A}, {0: B}).interval(0.9)
    just = max(abs(low), abs(high))
    assert effect({0: A}, {0: B}).is_within(just + 1e-9)
    assert not effect({0: A}, {0: B}).is_within(just - 1e-9)


def test_strata_remove_the_differences_between_them() -> None:
    """Widths that differ by 0.5 do not hide a difference of 0.1 within each."""
    a, b = {24: [0.30, 0.31, 0.29], 32: [0.80, 0.81, 0.79]}, {24: [0.20, 0.21, 0.19], 32: [0.70, 0.71, 0.69]}
    pooled = effect({0: [*a[24], *a[32]]}, {0: [*b[24], *b[32]]})
    assert effect(a, b).difference == pytest.approx(0.1) == pytest.approx(pooled.difference)
    assert effect(a, b).p < 0.001 < 0.5 < pooled.p
    with pytest.raises(ValueError, match="the same strata"):
        effect(a, {24: [0.2, 0.3]})


def test_one_run_has_no_interval() -> None:
    assert isnan(effect({0: [0.5]}, {0: A}).p)


def test_permutations_against_enumeration() -> None:
    """3 runs against 3 without overlap: 2 of 20 orders are as extreme."""
    assert permutation_p({0: [1.0, 2.0, 3.0]}, {0: [4.0, 5.0, 6.0]}) == pytest.approx(0.1, abs=0.01)
    assert permutation_p({0: A}, {0: A}) == 1
    strata = {0: [1.0, 2.0, 3.0], 1: [1.0, 2.0, 3.0]}, {0: [4.0, 5.0, 6.0], 1: [4.0, 5.0, 6.0]}
    assert permutation_p(*strata) == pytest.approx(2 / 400, abs=0.002)


@pytest.mark.parametrize("strata", [1, 2])
def test_the_interval_of_permutations_holds_what_they_do_not_reject(strata: int) -> None:
    """A shift just inside either end is not rejected, one just outside is; 0 is outside exactly where p < 0.05."""
    rng, near = np.random.default_rng(strata), 1e-6
    for centre in (0.0, 0.5, 1.0):
        a: Groups = {n: list(rng.normal(centre, 1, 8)) for n in range(strata)}
        b: Groups = {n: list(rng.normal(0, 0.3, 6)) for n in range(strata)}
        low, high = permutation_interval(a, b)
        assert low < effect(a, b).difference < high

        def p(shift: float, a: Groups = a, b: Groups = b) -> float:
            return permutation_p({n: [value - shift for value in values] for n, values in a.items()}, b)

        assert p(low - near) < 0.05 <= p(low + near)
        assert p(high + near) < 0.05 <= p(high - near)
        assert (permutation_p(a, b) < 0.05) == (not low <= 0 <= high)
        assert permutation_interval(a, b, 0.9)[0] > low


def test_the_interval_of_permutations_against_enumeration() -> None:
    """4 runs against 4, each group without spread: at every shift but 1 only 2 of 70 orders are as extreme. 3 runs
    against 3 have p = 0.1 at least."""
    low, high = permutation_interval({0: [1.0] * 4}, {0: [0.0] * 4})
    assert (low, high) == pytest.approx((1.0, 1.0))
    assert permutation_interval({0: [1.0, 2.0, 3.0]}, {0: [4.0, 5.0, 6.0]}) == (-np.inf, np.inf)


def test_fisher() -> None:
    assert fisher_p(3, 4, 1, 4) == pytest.approx(34 / 70)  # the lady tasting tea
    assert fisher_p(10, 20, 10, 20) == 1
