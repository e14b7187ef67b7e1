"""Copying and selective copying: rows written out by a loop, lengths and places by their law."""

import math

import pytest
import torch

from rebased.tasks import IGNORE, Copying, SelectiveCopying
from rebased.tasks.copying import BEGIN, END, PAD, SEPARATOR

COPYING = [
    Copying(),
    Copying(seq_len=10, min_length=1, max_length=4, vocab_size=6),
    Copying(seq_len=15, min_length=3, max_length=3, vocab_size=9),  # one length alone is a length
]


@pytest.mark.parametrize("split", ["train", "test", "held_out"])
@pytest.mark.parametrize("task", COPYING, ids=str)
def test_a_string_and_the_string_again(task: Copying, split: str) -> None:
    inputs, labels, slices = task.build(300, 42, "cpu", split)  # type: ignore[arg-type]
    assert slices == {}
    for row, asked in zip(inputs.tolist(), labels.tolist(), strict=True):
        length = row.index(SEPARATOR) - 1
        string = row[1 : length + 1]
        assert task.min_length <= length <= task.max_length
        assert all(4 <= letter < task.vocab_size for letter in string)
        wanted = [BEGIN, *string, SEPARATOR, *string]
        assert row == wanted + [PAD] * (task.seq_len - len(wanted))
        answers = [*string, END if split == "train" else IGNORE]
        assert asked == [IGNORE] * (length + 1) + answers + [IGNORE] * (task.seq_len - len(wanted))


def test_lengths_are_uniform_and_both_ends_are_included() -> None:
    inputs = Copying(seq_len=10, min_length=2, max_length=4).build(9_000, seed=1).inputs
    counts = torch.bincount((inputs == SEPARATOR).int().argmax(1) - 1, minlength=5).tolist()
    assert counts[:2] == [0, 0]
    assert all(abs(count - 3_000) < 5 * math.sqrt(9_000 * 2 / 9) for count in counts[2:])  # five standard deviations


def test_the_splits_share_inputs_and_differ_in_the_label_of_the_end() -> None:
    train, test = (Copying().build(20, 7, "cpu", split) for split in ("train", "test"))  # type: ignore[arg-type]
    assert torch.equal(train.inputs, test.inputs)
    assert ((train.labels != test.labels).sum(1) == 1).all()
    assert (train.labels[train.labels != test.labels] == END).all()


SELECTIVE = [
    SelectiveCopying(),
    SelectiveCopying(seq_len=12, n_tokens=3, vocab_size=8),
    SelectiveCopying(seq_len=7, n_tokens=3, vocab_size=4),  # no blank before the sign
    SelectiveCopying(seq_len=9, n_tokens=1, vocab_size=5),
]


@pytest.mark.parametrize("task", SELECTIVE, ids=str)
def test_tokens_among_blanks(task: SelectiveCopying) -> None:
    n, blank, sign = task.n_tokens, task.vocab_size - 2, task.vocab_size - 1
    inputs, labels, _ = task.build(300, seed=42)
    for row, asked in zip(inputs.tolist(), labels.tolist(), strict=True):
        assert row.index(sign) == task.seq_len - n - 1
        tokens = [token for token in row[: -n - 1] if token != blank]
        assert len(tokens) == n
        assert all(0 <= token < blank for token in tokens)
        assert row[-n - 2] != blank  # the last token stands right before the sign
        assert row[-n:] == [blank] * n
        assert asked == [IGNORE] * (task.seq_len - n) + tokens


def test_each_blank_goes_before_a_random_token() -> None:
    """With 2 tokens the blanks before the first one are binomial: 5 blanks, each with probability 1/2."""
    task = SelectiveCopying(seq_len=10, n_tokens=2, vocab_size=8)
    inputs = task.build(32_000, seed=5).inputs
    first = (inputs != 6).int().argmax(1)  # blanks before the first token
    counts = torch.bincount(first, minlength=6).double()
    expected = torch.tensor([math.comb(5, k) * 1_000.0 for k in range(6)], dtype=torch.float64)
    assert float(((counts - expected) ** 2 / expected).sum()) < 26  # chi2 with 5 degrees of freedom: 1 in 10,000


def test_counts() -> None:
    task = SelectiveCopying(seq_len=8, n_tokens=2, vocab_size=4)  # 4 strings, 3 blanks in 2 places: 4 ways
    assert task.count() == 16
    assert len(task.build(2_000, seed=0).inputs.unique(dim=0)) == 16
    string = Copying(seq_len=6, min_length=1, max_length=2, vocab_size=7)
    assert string.count() == 3 + 9
    assert len(string.build(2_000, seed=0).inputs.unique(dim=0)) == 12


@pytest.mark.parametrize(
    ("cls", "arguments", "message"),
    [
        (Copying, {"seq_len": 41}, "max_length=20 letters needs 42 tokens.*seq_len is 41: .*max_length <= 19"),
        (Copying, {"min_length": 21}, "max_length=20 is below min_length=21; raise it"),
        (Copying, {"min_length": 0}, "greater than or equal to 1"),
        (Copying, {"vocab_size": 5}, "greater than or equal to 6"),
        (SelectiveCopying, {"seq_len": 32}, "n_tokens=16 needs 33 tokens .*seq_len is 32: .*n_tokens <= 15"),
        (SelectiveCopying, {"n_tokens": 0}, "greater than or equal to 1"),
        (SelectiveCopying, {"vocab_size": 3}, "greater than or equal to 4"),
    ],
)
def test_impossible_sizes_are_named_with_their_remedy(cls: type, arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cls(**arguments)
