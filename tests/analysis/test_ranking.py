"""Places and main effects: what the tests decide, and what they do not."""

from random import Random

import pytest

from rebased.analysis.ranking import compare_pairs, main_effects, places, seeds_to_decide
from rebased.analysis.unpaired import permutation_interval

CELLS = ("MQAR, small", "MQAR, large", "overwriting, small", "overwriting, large")


def around(mean: float, seed: int, sd: float = 0.02, n: int = 5) -> dict[str, list[float]]:
    random = Random(seed)
    return {cell: [mean + random.gauss(0, sd) for _ in range(n)] for cell in CELLS}


def test_a_mixer_with_one_lucky_seed_does_not_lead() -> None:
    """Its mean is the best of all, because one seed of each cell has solved the task."""
    values = {f"steady {i}": around(0.2, i) for i in range(4)}
    lucky = around(0.12, 9)
    values["lucky"] = {cell: [1.0, *rest[1:]] for cell, rest in lucky.items()}
    means = {name: sum(map(sum, groups.values())) for name, groups in values.items()}
    assert max(means, key=lambda name: means[name]) == "lucky"
    found = places(list(values), compare_pairs(values))
    assert found["lucky"] == min(found.values()) == max(found.values()) == 1  # all share the first place


def test_a_decided_difference_makes_a_place_and_an_undecided_one_does_not() -> None:
    values = {"best": around(0.9, 1), "as good": around(0.9, 2), "worse": around(0.5, 3), "as bad": around(0.5, 4)}
    assert places(list(values), compare_pairs(values)) == {"best": 1, "as good": 1, "worse": 3, "as bad": 3}


def test_one_seed_per_cell_decides_nothing() -> None:
    values = {name: around(mean, 1, n=1) for name, mean in (("good", 0.9), ("bad", 0.1))}
    (contrast,) = compare_pairs(values)
    assert not contrast.is_decided
    assert set(places(list(values), [contrast]).values()) == {1}


def test_mixers_are_compared_on_cells_that_both_have() -> None:
    small = {CELLS[0]: [0.5, 0.51, 0.52, 0.5, 0.53]}
    (contrast,) = compare_pairs({"all": around(0.5, 1), "one": small})
    assert contrast.cells == 1
    (nothing,) = compare_pairs({"all": around(0.5, 1), "none": {"another cell": [0.1, 0.2]}})
    assert (nothing.cells, nothing.is_decided) == (0, False)


def test_main_effects_compare_mixers_that_differ_in_one_factor() -> None:
    factors = {
        "linear": {"square": False, "delta": False},
        "rebased": {"square": True, "delta": False},
        "deltanet": {"square": False, "delta": True},
        "delta rebased": {"square": True, "delta": True},
    }
    levels = {"linear": 0.2, "rebased": 0.5, "deltanet": 0.2, "delta rebased": 0.5, "other": 0.9}
    values = {name: around(level, i) for i, (name, level) in enumerate(levels.items())}
    square, delta = main_effects(values, factors)
    assert (square.a, square.cells) == ("square", 2 * len(CELLS))
    assert square.is_decided
    assert square.effect.difference == pytest.approx(0.3, abs=0.03)
    assert (delta.a, delta.is_decided) == ("delta", False)
    pairs = (("rebased", "linear"), ("delta rebased", "deltanet"))
    ours, theirs = ({(*pair, cell): values[pair[i]][cell] for pair in pairs for cell in CELLS} for i in (0, 1))
    assert square.interval == permutation_interval(ours, theirs)  # not Student's: it belongs to the test


def test_a_smaller_difference_needs_more_seeds() -> None:
    values = {"a": around(0.5, 1, sd=0.2), "b": around(0.55, 2, sd=0.2), "c": around(0.8, 3, sd=0.2)}
    near, far, _ = compare_pairs(values)
    few, many = seeds_to_decide(far, 5, 3), seeds_to_decide(near, 5, 3)
    assert 5 < few < many
    assert seeds_to_decide(near, 5, 30) > many  # more tests, a stricter correction
