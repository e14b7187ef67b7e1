"""The learning rate that is chosen for a model."""

import pytest

from rebased.analysis.selection import choose_lr


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


def test_a_search_in_stages_is_recognised() -> None:
    staged = {1e-2: {42: 0.6, 43: 0.5, 44: 0.1}, 1e-3: {42: 0.2, 43: 0.3}, 3e-3: {42: 0.1, 43: 0.2}}
    choice = choose_lr(staged)
    assert (choice.lr, choice.left_out, choice.staged) == (1e-2, (1e-3, 3e-3), (42, 43))
    assert choose_lr(staged | {1e-3: {42: 0.9, 43: 0.9}}).staged == ()  # another rate was better on the common seeds
    assert choose_lr(staged | {1e-3: {42: 0.6, 43: 0.5}}).staged == ()  # equally good and smaller: stages choose that
    assert choose_lr(staged | {3e-2: {42: 0.6, 43: 0.5}}).staged == (42, 43)  # equally good and larger: they do not
    assert choose_lr(staged | {1e-3: {45: 0.2}}).staged == ()  # no common seed
    assert choose_lr({1e-2: {42: 0.6}, 1e-3: {42: 0.2}}).staged == ()  # the whole rule: nothing is left out
