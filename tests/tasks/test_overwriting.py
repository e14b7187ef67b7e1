"""Overwriting: the last value is asked for, and neither order nor position tells it."""

import pytest
import torch

from rebased.tasks import IGNORE, Overwriting

TASKS = [
    Overwriting(),
    Overwriting(seq_len=20, kv_pairs=4, updates=2, vocab_size=21),  # 4n + 2u = T, and the smallest vocabulary
    Overwriting(seq_len=12, kv_pairs=1, updates=3, vocab_size=13),  # every key is written four times
    Overwriting(seq_len=64, kv_pairs=8, updates=0, vocab_size=70),
    Overwriting(seq_len=64, kv_pairs=4, updates=9, vocab_size=100, alpha=1.0),
]


@pytest.mark.parametrize("task", TASKS, ids=str)
def test_structure(task: Overwriting) -> None:
    n, writes, half = task.kv_pairs, task.kv_pairs + task.updates, task.vocab_size // 2
    inputs, labels, slices = task.build(300, seed=42)
    for row, asked, updated, kept in zip(
        inputs.tolist(), labels.tolist(), slices["updated"].tolist(), slices["kept"].tolist(), strict=True
    ):
        keys, values = row[0 : 2 * writes : 2], row[1 : 2 * writes : 2]
        assert len(set(keys)) == n
        assert all(1 <= key < half for key in keys)
        assert all(half <= value < task.vocab_size for value in values)
        assert len(set(values)) == writes
        times = {key: keys.count(key) for key in keys}
        assert max(times.values()) <= 4
        last = dict(zip(keys, values, strict=True))  # a later write replaces an earlier one
        queries = [t for t, label in enumerate(asked) if label != IGNORE]
        assert sorted(row[t] for t in queries) == sorted(last)
        assert all(t >= 2 * writes and t % 2 == 0 for t in queries)
        assert all(asked[t] == last[row[t]] for t in queries)
        assert [t for t, is_in in enumerate(updated) if is_in] == [t for t in queries if times[row[t]] > 1]
        assert [t for t, is_in in enumerate(kept) if is_in] == [t for t in queries if times[row[t]] == 1]
        assert all(row[t] == 0 for t in range(2 * writes, task.seq_len) if t not in queries)


def test_the_order_of_writes_is_uniform() -> None:
    """Two keys and one update: which of three writes is the single key's says nothing."""
    inputs = Overwriting(seq_len=12, kv_pairs=2, updates=1, vocab_size=40).build(24_000, seed=3).inputs
    keys = inputs[:, 0:6:2]
    alone = (keys.unsqueeze(1) == keys.unsqueeze(2)).sum(2).argmin(1)  # the write whose key comes once
    counts = torch.bincount(alone, minlength=3)
    assert float(((counts - 8_000) ** 2 / 8_000).sum()) < 18.4  # chi2(2) < 1e-4


def test_the_place_of_an_answer_says_nothing_about_updates() -> None:
    """The last write of an updated key comes later on average, but often before those of others."""
    task = Overwriting(seq_len=64, kv_pairs=8, updates=8, vocab_size=70)
    examples = task.build(2_000, seed=1)
    where = task.answer_positions(examples)
    updated, kept = (where[examples.slices[name]].double() for name in ("updated", "kept"))
    earlier = (updated.unsqueeze(1) < kept[:200].unsqueeze(0)).double().mean()
    assert 0.1 < float(earlier) < 0.5


def test_every_row_is_drawn() -> None:
    task = Overwriting(seq_len=10, kv_pairs=2, updates=1, vocab_size=11)  # 4 keys, 6 values, 2 slots
    orders = 6  # of three writes of two keys, one of them twice: aab aba baa and with b
    assert len(task.build(150_000, seed=0).inputs.unique(dim=0)) == 6 * orders * (6 * 5 * 4) * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kv_pairs": 4, "updates": 13}, "updates must lie between 0 and 3 kv_pairs = 12; got 13"),
        ({"seq_len": 18, "kv_pairs": 4, "updates": 2, "vocab_size": 64}, "need 20 tokens .* use seq_len >= 20"),
        ({"seq_len": 21, "kv_pairs": 4, "updates": 2}, "seq_len must be even, got 21"),
    ],
)
def test_impossible_sizes_are_named_with_their_remedy(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Overwriting(**arguments)  # type: ignore[arg-type]
