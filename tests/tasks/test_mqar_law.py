"""MQAR's examples are a function of the config: these are the rows that recorded runs were trained and tested on."""

import hashlib
from typing import Any

import pytest

from rebased.tasks import MQAR, Examples, task_data


def checksum(*examples: Examples) -> str:
    digest = hashlib.sha256()
    for inputs, labels, _ in examples:
        digest.update(inputs.numpy().astype("<i8").tobytes())
        digest.update(labels.numpy().astype("<i8").tobytes())
    return digest.hexdigest()[:16]


SMALL = {"seq_len": 16, "kv_pairs": 3, "vocab_size": 40}
FULL = {"seq_len": 16, "kv_pairs": 4, "vocab_size": 17}
NOISY = {"seq_len": 32, "kv_pairs": 4, "vocab_size": 64, "alpha": 0.5, "random_non_queries": True}


@pytest.mark.parametrize(
    ("settings", "n", "seed", "expected"),
    [
        (SMALL, 7, 0, "daf93abbb21f4ba0"),
        (SMALL, 1500, 42, "8de2f168af794f6c"),
        (FULL, 7, 0, "b1a93adc5deb4201"),
        (FULL, 1500, 42, "f1b3e01ec379858d"),
        (NOISY, 7, 0, "f33996d11701ba02"),
        (NOISY, 1500, 42, "2e42f382c227cf7f"),
    ],
)
def test_a_seed_means_these_rows(settings: dict[str, Any], n: int, seed: int, expected: str) -> None:
    assert checksum(MQAR(**settings).build(n, seed)) == expected


def segment(seq_len: int, kv_pairs: int, examples: int) -> dict[str, int]:
    return {"seq_len": seq_len, "kv_pairs": kv_pairs, "examples": examples}


CROWDED = {  # 60 different examples: most draws of the later splits are dropped and drawn again
    "vocab_size": 10,
    "train": [segment(8, 1, 30)],
    "test": [segment(8, 1, 25)],
    "held_out": [segment(8, 1, 20)],
}
MIXED = {
    "vocab_size": 64,
    "alpha": 0.3,
    "random_non_queries": True,
    "train": [segment(16, 2, 100), segment(32, 8, 50)],
    "test": [segment(16, 4, 70), segment(32, 8, 20)],
    "held_out": [segment(32, 2, 9)],
    "seeds": "per_run",
    "train_seed": 1,
    "test_seed": 2,
    "held_out_seed": 3,
}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (CROWDED, ["ba16a88162f24c3a", "b55334bfdad3cfd6", "2a5dd19d532863a0"]),
        (MIXED, ["4785f0b391691078", "5d733d84221e8abf", "97a906503d26babc"]),
    ],
)
def test_a_config_means_these_splits(settings: dict[str, Any], expected: list[str]) -> None:
    assert [checksum(*split) for split in task_data("mqar").model_validate(settings).build(7)] == expected
