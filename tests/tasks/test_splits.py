"""Splits share no example, segments keep their order, and data seeds are shared or a run's own."""

import pytest
import torch

from rebased.tasks import MQAR, Examples, TaskData, task_data
from rebased.tasks.splits import _hash_rows

MQARData = task_data("mqar")
TINY = {"seq_len": 8, "kv_pairs": 1}  # with a vocabulary of 10: 4 keys, 5 values, 3 slots, 60 examples


def rows(examples: Examples) -> set[tuple[int, ...]]:
    return set(map(tuple, examples.inputs.tolist()))


def small(**arguments: object) -> TaskData:
    segment = {"seq_len": 16, "kv_pairs": 2, "examples": 20}
    return MQARData(**({"train": [segment], "test": [segment], "vocab_size": 64} | arguments))


def test_the_default_is_the_papers_data() -> None:
    data = MQARData()
    (train,), (test,) = data.train, data.test
    assert (train.seq_len, train.kv_pairs, train.examples) == (256, 64, 100_000)
    assert (test.seq_len, test.kv_pairs, test.examples) == (256, 64, 3_000)
    assert (data.vocab_size, data.alpha, data.held_out, data.seeds) == (8192, 0.01, (), "shared")
    assert (data.train_seed, data.test_seed, data.held_out_seed) == (42, 52, 62)


def test_splits_share_no_example_where_independent_draws_would() -> None:
    task = MQAR(vocab_size=10, **TINY)
    assert task.count() == 60
    assert rows(task.build(40, seed=1)) & rows(task.build(10, seed=2))
    data = MQARData(vocab_size=10, train=[{**TINY, "examples": 40}], test=[{**TINY, "examples": 200}], seeds="per_run")
    for run_seed in range(5):
        (train,), (test,), _ = data.build(run_seed)
        assert (len(train.inputs), len(test.inputs)) == (40, 200)
        assert not rows(train) & rows(test)


def test_the_held_out_split_differs_from_both_others() -> None:
    segments = [{**TINY, "examples": 12}]
    data = MQARData(vocab_size=10, train=segments, test=segments, held_out=segments)
    (train,), (test,), (held_out,) = data.build(0)
    assert len(held_out.inputs) == 12
    assert not rows(held_out) & (rows(train) | rows(test))


def test_equal_seeds_do_not_make_train_and_test_equal() -> None:
    splits = small(test_seed=42).build(0)
    assert not rows(splits.train[0]) & rows(splits.test[0])


def test_segments_of_one_length_are_kept_apart_whatever_their_load() -> None:
    train = [{**TINY, "examples": 15}, {"seq_len": 12, "kv_pairs": 1, "examples": 5}, {**TINY, "examples": 15}]
    splits = MQARData(vocab_size=14, train=train, test=[{**TINY, "examples": 100}]).build(0)
    assert [tuple(e.inputs.shape) for e in splits.train] == [(15, 8), (5, 12), (15, 8)]
    assert not torch.equal(splits.train[0].inputs, splits.train[2].inputs)  # equal segments are not equal draws
    assert not rows(splits.test[0]) & (rows(splits.train[0]) | rows(splits.train[2]))


def test_testing_may_be_longer_and_fuller_than_training() -> None:
    test = [MQARData.segment_type(seq_len=T, kv_pairs=n, examples=rows) for T, n, rows in ((16, 2, 3), (64, 16, 4))]
    data = small(test=test, vocab_size=128)
    splits = data.build(0)
    assert [tuple(e.inputs.shape) for e in splits.test] == [(3, 16), (4, 64)]
    assert (splits.test[1].labels >= 64).sum(1).tolist() == [16] * 4
    assert splits.held_out == ()
    assert data.task(test[1]) == MQAR(seq_len=64, kv_pairs=16, vocab_size=128)


def test_a_task_with_too_few_examples_is_an_error() -> None:
    segments = {"train": [{**TINY, "examples": 5_000}], "test": [{**TINY, "examples": 7}]}
    with pytest.raises(ValueError, match=r"test: 7 of 7 examples .*only 60 different ones; raise vocab_size"):
        MQARData(vocab_size=10, **segments).build(0)


def test_data_seeds_are_shared_by_runs_or_a_runs_own() -> None:
    shared, own = small(), small(seeds="per_run")
    assert torch.equal(shared.build(1).train[0].inputs, shared.build(2).train[0].inputs)
    assert torch.equal(own.build(1).test[0].inputs, own.build(1).test[0].inputs)
    for split in ("train", "test"):
        first, second = (getattr(own.build(seed), split)[0] for seed in (1, 2))
        assert not torch.equal(first.inputs, second.inputs)
    other = small(train_seed=43).build(1)
    assert not torch.equal(other.train[0].inputs, shared.build(1).train[0].inputs)


def test_rows_are_hashed_by_their_tokens_and_order() -> None:
    inputs = MQAR(seq_len=16, kv_pairs=4).build(50_000, seed=0).inputs
    assert len(_hash_rows(inputs).unique()) == len(inputs.unique(dim=0))
    assert torch.equal(_hash_rows(inputs[:7]), _hash_rows(inputs)[:7])
    assert _hash_rows(torch.tensor([[1, 2]])) != _hash_rows(torch.tensor([[2, 1]]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"train": []}, "train is empty: give at least one segment"),
        ({"test": []}, "test is empty: give at least one segment"),
        ({"train": [{"seq_len": 15, "kv_pairs": 2, "examples": 1}]}, r"train\[0\]: seq_len must be even, got 15"),
        ({"held_out": [{"seq_len": 8, "kv_pairs": 3, "examples": 1}]}, r"held_out\[0\]: kv_pairs=3 needs 12 tokens"),
        ({"vocab_size": 16}, r"train\[0\]: vocab_size must exceed seq_len=16, got 16"),
        ({"alpha": -1.0}, "greater than 0"),
        ({"test": [{"examples": 0}]}, "greater than or equal to 1"),
        ({"train_seed": -1}, "greater than or equal to 0"),
        ({"seeds": "own"}, "'shared' or 'per_run'"),
        ({"tset": []}, "unknown key 'tset'; did you mean 'test'"),
    ],
)
def test_bad_data_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small(**arguments)


def test_a_negative_run_seed_is_refused() -> None:
    with pytest.raises(ValueError, match=r"seeds and counters must be 0 or more, got \(42, 0, 0, -1\)"):
        small(seeds="per_run").build(-1)
