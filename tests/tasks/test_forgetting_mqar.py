"""Forgetting MQAR: the last value is asked for, and never by chance the old one."""

import pytest
import torch

from rebased.tasks import IGNORE, MQAR, ForgettingMQAR

TASKS = [
    ForgettingMQAR(),
    ForgettingMQAR(seq_len=20, kv_pairs=4, updates=2, vocab_size=21),  # 4n + 2u = T, and the smallest vocabulary
    ForgettingMQAR(seq_len=6, kv_pairs=1, updates=1, vocab_size=7),  # every key is updated
    ForgettingMQAR(seq_len=64, kv_pairs=8, updates=8, vocab_size=70),
    ForgettingMQAR(seq_len=64, kv_pairs=4, updates=3, vocab_size=100, alpha=1.0),
]


@pytest.mark.parametrize("task", TASKS, ids=str)
def test_structure(task: ForgettingMQAR) -> None:
    n, u, half = task.kv_pairs, task.updates, task.vocab_size // 2
    inputs, labels, slices = task.build(300, seed=42)
    for row, asked, updated, kept in zip(
        inputs.tolist(), labels.tolist(), slices["updated"].tolist(), slices["kept"].tolist(), strict=True
    ):
        keys, old = row[0 : 2 * n : 2], row[1 : 2 * n : 2]
        again, new = row[2 * n : 2 * (n + u) : 2], row[2 * n + 1 : 2 * (n + u) : 2]
        assert len(set(keys)) == n
        assert len(set(again)) == u
        assert set(again) <= set(keys)
        assert all(1 <= key < half for key in keys)
        assert all(half <= value < task.vocab_size for value in old + new)
        assert len(set(old + new)) == n + u  # so no update gives a key the value that it had
        last = dict(zip(keys, old, strict=True)) | dict(zip(again, new, strict=True))
        queries = [t for t, label in enumerate(asked) if label != IGNORE]
        assert sorted(row[t] for t in queries) == sorted(keys)
        assert all(t >= 2 * (n + u) and t % 2 == 0 for t in queries)
        assert all(asked[t] == last[row[t]] for t in queries)
        assert [t for t, is_in in enumerate(updated) if is_in] == [t for t in queries if row[t] in again]
        assert [t for t, is_in in enumerate(kept) if is_in] == [t for t in queries if row[t] not in again]
        assert all(row[t] == 0 for t in range(2 * (n + u), task.seq_len) if t not in queries)


def test_which_keys_are_updated_is_uniform() -> None:
    task = ForgettingMQAR(seq_len=20, kv_pairs=4, updates=2, vocab_size=40)
    inputs = task.build(24_000, seed=3).inputs
    place = (inputs[:, 0:8:2, None] == inputs[:, None, 8:12:2]).int().argmax(1)  # [N,2] which of the 4 keys
    counts = torch.bincount(4 * place[:, 0] + place[:, 1], minlength=16).view(4, 4)
    assert (counts.diagonal() == 0).all()
    expected = 24_000 / 12
    assert float(((counts - expected) ** 2 / expected)[~torch.eye(4, dtype=torch.bool)].sum()) < 36  # chi2(11) < 1e-4


def test_random_fillers_change_no_question() -> None:
    sizes = {"seq_len": 32, "kv_pairs": 4, "updates": 2, "vocab_size": 40}
    plain, noisy = (ForgettingMQAR(**sizes, random_non_queries=noise).build(50, seed=1) for noise in (False, True))
    assert torch.equal(plain.labels, noisy.labels)
    assert torch.equal(plain.inputs[plain.inputs > 0], noisy.inputs[plain.inputs > 0])
    assert (noisy.inputs[plain.inputs == 0] > 0).any()


def test_counts() -> None:
    task = ForgettingMQAR(seq_len=6, kv_pairs=1, updates=1, vocab_size=7)  # 2 keys, 4 values, 1 slot
    assert task.count() == 2 * 4 * 3
    assert len(task.build(2_000, seed=0).inputs.unique(dim=0)) == task.count()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kv_pairs": 4, "updates": 5}, "updates must lie between 1 and kv_pairs=4.*got 5"),
        ({"kv_pairs": 4, "updates": 0}, "updates must lie between 1 and kv_pairs=4.*got 0"),
        (
            {"seq_len": 18, "kv_pairs": 4, "updates": 2, "vocab_size": 64},
            "need 20 tokens .* but seq_len is 18: use seq_len >= 20",
        ),
        ({"seq_len": 21, "kv_pairs": 4, "updates": 2}, "seq_len must be even, got 21"),
        ({"seq_len": 20, "kv_pairs": 4, "updates": 2, "vocab_size": 20}, "vocab_size must exceed seq_len=20, got 20"),
    ],
)
def test_impossible_sizes_are_named_with_their_remedy(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ForgettingMQAR(**arguments)


def test_mqar_has_no_updates() -> None:
    with pytest.raises(ValueError, match="unknown key 'updates'"):
        MQAR(updates=1)  # type: ignore[call-arg]
