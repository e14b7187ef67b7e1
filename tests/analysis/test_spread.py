"""Mean, sample standard deviation and bootstrap interval."""

from math import isnan, sqrt

import numpy as np
import pytest

from rebased.analysis import describe


def test_by_hand() -> None:
    found = describe([0.1, 0.2, 0.6])
    assert found.n == 3
    assert found.mean == pytest.approx(0.3)
    assert found.sd == pytest.approx(sqrt((0.04 + 0.01 + 0.09) / 2))  # ddof 1
    assert 0.1 <= found.low < found.mean < found.high <= 0.6
    assert found == describe([0.1, 0.2, 0.6])  # the bootstrap too


def test_the_interval_covers_the_mean_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    found = [describe(list(rng.normal(0.5, 0.1, size=20))) for _ in range(120)]
    covered = sum(one.low < 0.5 < one.high for one in found)
    assert 105 <= covered <= 119  # 114 expected, a little less for so few values


def test_one_value_has_no_spread() -> None:
    found = describe([0.5])
    assert (found.n, found.mean) == (1, 0.5)
    assert all(isnan(value) for value in (found.sd, found.low, found.high))


def test_two_values_have_a_spread_and_no_interval() -> None:
    found = describe([0.4, 0.6])
    assert found.sd == pytest.approx(0.2 / sqrt(2))
    assert isnan(found.low)
    assert isnan(found.high)


def test_equal_values() -> None:
    assert describe([1.0, 1.0, 1.0]) == (3, 1.0, 0.0, 1.0, 1.0)


@pytest.mark.parametrize(("values", "message"), [([], "nothing to describe"), ([0.1, float("nan")], "finite number")])
def test_bad_input(values: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        describe(values)
