"""The learning rate that is chosen for a model."""

import pytest

from rebased.analysis import choose_lr


def test_the_best_mean_over_seeds() -> None:
    choice = choose_lr({1e-2: {42: 0.9, 43: 0.1}, 1e-3: {42: 0.6, 43: 0.5}})
    assert (choice.lr, choice.mean, choice.tried, choice.left_out) == (1e-3, pytest.approx(0.55), 2, ())


def test_of_equals_the_smallest() -> None:
    assert choose_lr({1e-2: {1: 0.5}, 5e-4: {1: 0.5}, 1e-3: {1: 0.5}}).lr == 5e-4


def test_a_lucky_rate_with_fewer_seeds_is_not_chosen() -> None:
    choice = choose_lr({1e-2: {42: 1.0}, 1e-3: {42: 0.6, 43: 0.5}, 3e-3: {}})
    assert (choice.lr, choice.tried, choice.left_out) == (1e-3, 1, (1e-2,))


def test_nothing_to_choose_from() -> None:
    with pytest.raises(ValueError, match="no accuracy to choose a learning rate by"):
        choose_lr({1e-3: {}})
