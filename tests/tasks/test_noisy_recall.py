"""Noisy recall: rows read by a loop, and the law of noise, keys, values and of the key that is asked for last."""

import math

import pytest
import torch
from scipy.stats import chisquare

from rebased.tasks import IGNORE, NoisyRecall

TASKS = [
    NoisyRecall(),  # MAD's base settings
    NoisyRecall(seq_len=9, vocab_size=10, noise_tokens=4, noise=0.6),
    NoisyRecall(seq_len=3, vocab_size=4, noise_tokens=1),  # one key, two slots
    NoisyRecall(seq_len=31, vocab_size=17, noise_tokens=2, noise=0.0),
]


@pytest.mark.parametrize("task", TASKS, ids=str)
def test_rows_read_by_a_loop(task: NoisyRecall) -> None:
    first_noise, n_keys = task.vocab_size - task.noise_tokens, (task.vocab_size - task.noise_tokens) // 2
    train, test = (task.build(300, 42, "cpu", split) for split in ("train", "test"))  # type: ignore[arg-type]
    assert torch.equal(train.inputs, test.inputs)
    for row, following, asked in zip(test.inputs.tolist(), train.labels.tolist(), test.labels.tolist(), strict=True):
        tokens = [*row, following[-1]]
        assert following == tokens[1:]
        value_of: dict[int, int] = {}
        wanted = [IGNORE] * task.seq_len
        for t in range(0, len(tokens), 2):
            key, value = tokens[t : t + 2]
            if key >= first_noise:
                assert value >= first_noise
                continue
            assert key < n_keys <= value < first_noise
            if key in value_of:
                wanted[t] = value_of[key]
            assert value_of.setdefault(key, value) == value
        assert asked == wanted
        assert asked[-1] == tokens[-1]  # the last key was shown before


def test_the_law() -> None:
    """Of 4 slots the first three are noise with probability 0.5 unless spared: (2/3) 0.5 = 1/3."""
    task = NoisyRecall(seq_len=7, vocab_size=11, noise_tokens=4, noise=0.5)  # keys 0 to 2, values 3 to 6
    inputs, labels, _ = task.build(30_000, seed=1)
    slots = torch.cat([inputs, labels[:, -1:]], dim=1).view(-1, 4, 2)
    is_noise = slots[:, :, 0] >= 7
    deviation = 5 * math.sqrt(30_000 * 2 / 9)
    assert all(abs(count - 10_000) < deviation for count in is_noise.sum(0)[:3].tolist())
    assert is_noise.sum(1).max() == 2  # never all of them
    assert not is_noise[:, 3].any()
    for tokens, low, n in (
        (slots[:, 0][is_noise[:, 0]].flatten(), 7, 4),
        (slots[:, 1, 0][~is_noise[:, 1]], 0, 3),
        (slots[:, 1, 1][~is_noise[:, 1]], 3, 4),
    ):
        assert chisquare((tokens - low).bincount(minlength=n)).pvalue > 1e-3
    one, two = slots[:, 0, 0], slots[:, 1, 0]  # two keys once each, then noise: either may be asked for last
    fair = (one < 3) & (two < 3) & (one != two) & is_noise[:, 2]
    assert chisquare((slots[fair, 3, 0] == one[fair]).long().bincount()).pvalue > 1e-3
    twice = ~is_noise[:, 2] & (one == two) & (one < 3) & (slots[:, 2, 0] != one)  # how often a key came is no matter
    assert chisquare((slots[twice, 3, 0] == one[twice]).long().bincount()).pvalue > 1e-3


def test_mads_number_of_labels() -> None:
    """56 of 64 values are asked for without noise and with 8 keys; 24 with 64 keys."""
    for vocab_size, expected in ((17, 56), (129, 24)):
        labels = NoisyRecall(vocab_size=vocab_size, noise_tokens=1, noise=0.0).build(2_000, 3, "cpu", "test").labels
        assert float((labels != IGNORE).sum(1).double().mean()) == pytest.approx(expected, abs=0.5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seq_len": 128}, "seq_len must be odd, got 128: use 127 or 129"),
        ({"vocab_size": 18}, "too few keys and values beside noise_tokens=16; use vocab_size >= 19"),
        ({"noise": 1.0}, "less than 1"),
    ],
)
def test_impossible_sizes_are_named_with_their_remedy(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NoisyRecall(**arguments)  # type: ignore[arg-type]
