"""Intervals satisfy their definition, and cover the known truth of simulated data as often as they should."""

from math import sqrt

import numpy as np
import pytest

from rebased.analysis.intervals import bootstrap_means, wilson
from rebased.analysis.spread import student_interval


@pytest.mark.parametrize(("correct", "asked"), [(0, 1), (0, 7), (3, 7), (7, 7), (499, 1000), (1, 10_000)])
def test_wilson_solves_its_equation(correct: int, asked: int) -> None:
    """Its ends are the proportions p that are 1.96 of their own standard errors away from the observed one."""
    low, high = wilson(correct, asked)
    assert low <= correct / asked <= high
    assert (low == 0, high == 1) == (correct == 0, correct == asked)
    for p in {low, high} - {0.0, 1.0}:
        assert abs(p - correct / asked) / sqrt(p * (1 - p) / asked) == pytest.approx(1.959964, rel=1e-6)


def test_wilson_of_nothing() -> None:
    with pytest.raises(ValueError, match="got 0 of 0"):
        wilson(0, 0)
    with pytest.raises(ValueError, match="got 4 of 3"):
        wilson(4, 3)


def test_students_interval() -> None:
    """By hand: the interval of 9, 10, 11 is 10 plus or minus 4.3027 standard errors of 1 / sqrt(3)."""
    values, half = [9.0, 10.0, 11.0], 1 / sqrt(3)
    assert student_interval(values) == pytest.approx((10 - 4.302653 * half, 10 + 4.302653 * half))
    assert student_interval(values, level=0.5) == pytest.approx((10 - 0.816497 * half, 10 + 0.816497 * half))
    assert np.isnan([student_interval([3.0]), student_interval([3.0, 4.0])]).all()


def test_a_bootstrap_holds_the_truth_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(60):
        counts = rng.integers(20, 60, size=(80, 1))
        sums = counts * (3 + rng.normal(size=(80, 1)) * 0.5)  # windows differ, and so does their number of tokens
        ((low, high),) = bootstrap_means(sums, counts)
        hits += low < 3 < high
        assert 0.05 < high - low < 0.5
    assert hits >= 51  # 57 expected; fewer than 51 of 60 has a chance of 1 %


def test_columns_share_their_draws_and_calls_their_numbers() -> None:
    sums, counts = np.random.default_rng(0).random((50, 2)), np.ones((50, 2))
    sums[:, 1] = sums[:, 0]
    first, second = bootstrap_means(sums, counts)
    assert first == second
    assert bootstrap_means(sums, counts) == [first, second]


def test_where_nothing_can_be_said() -> None:
    assert np.isnan(bootstrap_means(np.ones((1, 2)), np.ones((1, 2)))).all()
    none, some = bootstrap_means(*np.array([[[0, 1]] * 9] * 2))
    assert np.isnan(none).all()
    assert some == (1, 1)
    in_one, in_two = bootstrap_means(*np.array([[[5, 2], [0, 4], [0, 0]], [[2, 1], [0, 1], [0, 0]]]))
    assert np.isnan(in_one).all()  # every draw that has its window gives the same mean
    assert in_two == (2, 4)
