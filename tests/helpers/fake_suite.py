"""A small suite, and invented records of its runs."""

from collections.abc import Callable, Iterator
from typing import Any

from fake_records import CODE, MACHINE, slices
from rebased.runs.finished import Run
from rebased.runs.suite import Suite
from rebased.runs.synthetic_config import SyntheticRunConfig

SPLITS = ("train", "test", "held_out")


def segments(**sizes: int) -> dict[str, Any]:
    return {split: [{"seq_len": 16, "examples": 32, **sizes}] for split in SPLITS}


TREE: dict[str, Any] = {
    "about": "A small suite.",
    "tasks": {
        "MQAR": {"began": 0.3, "task": {"name": "mqar", "vocab_size": 32, **segments(kv_pairs=2)}},
        "overwriting": {
            "began": 0.4,
            "task": {"name": "overwriting", "vocab_size": 32, **segments(kv_pairs=2, updates=1)},
        },
    },
    "state_bytes": [512, 2048],
    "rates": [1e-3, 1e-2],
    "choose_seeds": [1],
    "score_seeds": [11, 12, 13, 14, 15],
    "model": {"d_model": 16, "positions": "none", "embed_dropout": 0, "mixers": ["short_conv", "MIXER"]},
    "train": {"epochs": 1, "batch_size": 32, "device": "cpu"},
    "mixers": {
        "Linear": {"mixer": {"name": "linear_attention", "n_heads": 1}, "factors": {"square": False, "delta": False}},
        "ReBased": {"mixer": {"name": "rebased", "n_heads": 1}, "factors": {"square": True, "delta": False}},
        "Delta": {"mixer": {"name": "delta_rebased", "n_heads": 1}, "factors": {"square": True, "delta": True}},
        "Attention": {"mixer": {"name": "attention", "n_heads": 1}, "unsized": True},
    },
    "drawn": ["ReBased", "Linear"],
}
Accuracy = Callable[[SyntheticRunConfig], float]


def small_suite(**changes: Any) -> Suite:
    return Suite.model_validate(TREE | changes)


def fake_run_of(config: SyntheticRunConfig, test: float, held_out: float) -> Run:
    """A finished run of one epoch with these accuracies."""
    lines: list[dict[str, Any]] = [
        {
            "type": "run",
            "digest": config.digest(),
            "parameters": 1000,
            "config": config.model_dump(mode="json"),
            "code": CODE,
            "machine": MACHINE,
        },
        {"type": "epoch", "epoch": 1, "loss": 1.0, "seconds": 3.0, "test_seconds": 0.5}
        | {"test": slices(test, (2,), 16), "held_out": slices(held_out, (2,), 16)},
        {"type": "end", "status": "done"},
    ]
    return Run(config.digest(), lines)


def suite_runs(suite: Suite, level: dict[str, float], spread: float = 0.01) -> Iterator[Run]:
    """The runs of these mixers: every rate with the first seed, and fresh seeds at 1e-2, which is the better one. The
    held-out accuracy is the level, and more with every seed; the test accuracy is 0.1 more than that."""
    for name, accuracy in level.items():
        for config in suite.configs("small", name, suite.mixers[name]):
            first = config.train.seed in suite.choose_seeds
            if first or config.train.lr == 1e-2:
                found = accuracy + spread * (config.train.seed % 10) - (0.1 if config.train.lr < 1e-2 else 0)
                yield fake_run_of(config, min(1.0, found + 0.1), min(1.0, found))
