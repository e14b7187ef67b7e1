"""Mean, sample standard deviation and Student's interval."""

from math import isnan, sqrt

import numpy as np
import pytest

from rebased.analysis.spread import describe


def test_by_hand() -> None:
    found = describe([0.1, 0.2, 0.6])
    assert found.n == 3
    assert found.mean == pytest.approx(0.3)
    assert found.sd == pytest.approx(sqrt((0.04 + 0.01 + 0.09) / 2))  # ddof 1
    half = 4.302653 * found.sd / sqrt(3)  # Student's t with two degrees of freedom
    assert (found.low, found.high) == pytest.approx((0.3 - half, 0.3 + half))


@pytest.mark.parametrize("n", [3, 5])
def test_the_interval_of_a_few_seeds_covers_the_mean_as_often_as_it_says(n: int) -> None:
    rng = np.random.default_rng(1)
    found = [describe(list(rng.normal(0.5, 0.1, size=n))) for _ in range(400)]
    covered = sum(one.low < 0.5 < one.high for one in found)
    assert abs(covered - 380) < 4 * sqrt(400 * 0.95 * 0.05)


def test_one_value_has_no_spread() -> None:
    found = describe([0.5])
    assert (found.n, found.mean) == (1, 0.5)
    assert all(isnan(value) for value in (found.sd, found.low, found.high))


def test_two_values_have_a_spread_and_no_interval() -> None:
    found = describe([0.4, 0.6])
    assert found.sd == pytest.approx(0.2 / sqrt(2))
    assert isnan(found.low)
    assert isnan(found.high)


def test_equal_values_have_no_interval() -> None:
    found = describe([1.0, 1.0, 1.0])
    assert found[:3] == (3, 1.0, 0.0)
    assert isnan(found.low)  # a width of zero would say that the mean is known exactly
    assert isnan(found.high)


@pytest.mark.parametrize(("values", "message"), [([], "nothing to describe"), ([0.1, float("nan")], "finite number")])
def test_bad_input(values: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        describe(values)
