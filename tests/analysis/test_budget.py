"""Expected validation performance, compared with an enumeration of all draws."""

from itertools import combinations, product
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rebased.analysis.selection import expected_validation_performance

ACCURACIES = st.lists(st.floats(0, 1), min_size=1, max_size=5)


@given(values=ACCURACIES)
@settings(max_examples=60, deadline=None)
def test_it_is_the_mean_best_of_all_draws(values: list[float]) -> None:
    budgets = range(1, len(values) + 1)
    again = [fmean(max(draw) for draw in product(values, repeat=m)) for m in budgets]
    anew = [fmean(max(draw) for draw in combinations(values, m)) for m in budgets]
    assert expected_validation_performance(values) == pytest.approx(again)
    assert expected_validation_performance(values, replacement=False) == pytest.approx(anew)


def test_by_hand() -> None:
    assert expected_validation_performance([0.0, 1.0]) == [0.5, 0.75]
    assert expected_validation_performance([1.0, 0.0], replacement=False) == [0.5, 1.0]


@pytest.mark.parametrize(("values", "message"), [([], "no value"), ([0.5, float("nan")], "finite number; got")])
def test_bad_input(values: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        expected_validation_performance(values)
