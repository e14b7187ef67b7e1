"""Every example once an epoch, in an order that (seed, epoch) alone decides."""

from itertools import pairwise

import pytest
import torch

from rebased.tasks import epoch_batches
from rebased.tasks.draws import mix_seed


def as_lists(*arguments: object) -> list[tuple[int, list[int]]]:
    return [(segment, rows.tolist()) for segment, rows in epoch_batches(*arguments)]


@pytest.mark.parametrize("sizes", [[10], [10, 3, 8], [1, 1], [1000]])
@pytest.mark.parametrize("batch_size", [1, 4, 5, 2000])
def test_every_example_once_and_no_batch_across_segments(sizes: list[int], batch_size: int) -> None:
    batches = as_lists(sizes, batch_size, 0, 0)
    for segment, size in enumerate(sizes):
        mine = [rows for owner, rows in batches if owner == segment]
        assert sorted(row for rows in mine for row in rows) == list(range(size))
        full, rest = divmod(size, batch_size)
        assert sorted(map(len, mine), reverse=True) == [batch_size] * full + [rest] * (rest > 0)


def test_the_order_is_a_function_of_seed_and_epoch() -> None:
    orders = {(seed, epoch): as_lists([100, 50], 16, seed, epoch) for seed in (42, 43) for epoch in range(3)}
    torch.rand(5)  # the global state has no say
    assert all(order == as_lists([100, 50], 16, *key) for key, order in orders.items())
    assert len({str(order) for order in orders.values()}) == len(orders)


def test_segments_are_interleaved() -> None:
    owners = [segment for segment, _ in as_lists([400, 400], 4, 0, 0)]
    changes = sum(a != b for a, b in pairwise(owners))
    assert 70 < changes < 130  # a fair shuffle of 100 + 100 changes owner 100 times, give or take 7


def test_global_generators_are_left_alone() -> None:
    before = torch.get_rng_state()
    epoch_batches([10], 2, 0, 0)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], 4, 0, 0), r"at least one segment, each of at least one example, got \[\]"),
        (([5, 0], 4, 0, 0), r"at least one segment, each of at least one example, got \[5, 0\]"),
        (([5], 0, 0, 0), "batch_size must be at least 1, got 0"),
        (([5], 4, -1, 0), r"seeds and counters must be 0 or more, got \(-1, 0\)"),
        (([5], 4, 0, -2), r"seeds and counters must be 0 or more, got \(0, -2\)"),
    ],
)
def test_bad_arguments_are_refused(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        epoch_batches(*arguments)


def test_mixed_seeds_do_not_meet() -> None:
    mixed = [mix_seed(seed, *stream) for seed in range(50) for stream in [(), (0,), (1,), (0, 0), (0, 1), (1, 0)]]
    assert len(set(mixed)) == len(mixed)
    assert mix_seed(42, 1) == mixed[42 * 6 + 2]
    assert all(0 <= seed < 2**64 for seed in mixed)
