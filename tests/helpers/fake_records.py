"""Invented records of runs, with the accuracies that a test needs."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rebased.config import load_config, merge
from rebased.paper.reference import NEOX_VOCABULARY
from rebased.runs.finished import Run
from rebased.runs.lm_config import LMRunConfig
from rebased.runs.shipped import CONFIGS
from rebased.runs.synthetic_config import SyntheticRunConfig

ENWIK8 = {  # as in the sweep enwik8
    "rebased": {},
    "based": {"model.mixers": "[short_conv, {name: based, n_heads: 12, key_width: 16}]"},
    "attention": {
        "model.mixers": "[{name: attention, n_heads: 6, qkv_bias: false, dropout: 0}]",
        "model.n_layers": "8",
    },
}
MACHINE = {"cpu": "A CPU", "cores": 2, "threads": 1, "gpu": None, "system": "Linux", "python": "3.11", "torch": "2.9"}
CODE = {"version": "0.1.0", "commit": "0123456789abcdef", "dirty": False}


def fake_run(
    model: str = "rebased",
    accuracies: Sequence[float] = (0.1, 0.5),
    *,
    seed: int = 42,
    pairs: Sequence[int] = (4,),
    lr: float = 1e-3,
    seq_len: int = 32,
    d_model: int = 24,
    held_out: Sequence[float] | None = None,
    status: str | None = "done",
    commit: str = "0123456789abcdef",
    changes: dict[str, Any] | None = None,
) -> Run:
    """A run on MQAR with one epoch per accuracy. `held_out` are accuracies on that split; `changes` are settings."""
    segments = [{"seq_len": seq_len, "kv_pairs": n, "examples": 10} for n in pairs]
    settings: dict[str, Any] = {
        "task": {"train": segments[:1], "test": segments, "held_out": segments if held_out else []},
        "model": {"preset": model, "d_model": d_model},
        "train": {"seed": seed, "epochs": 5, "lr": lr},
    }
    settings["task"] |= {"vocab_size": 64 if seq_len < 64 else 8192}
    config = SyntheticRunConfig.model_validate(merge(settings, changes or {}))
    lines: list[dict[str, Any]] = [
        {
            "type": "run",
            "digest": config.digest(),
            "parameters": 1234,
            "config": config.model_dump(mode="json"),
            "code": CODE | {"commit": commit},
            "machine": MACHINE,
        }
    ]
    for epoch, accuracy in enumerate(accuracies, start=1):
        line: dict[str, Any] = {"type": "epoch", "epoch": epoch, "loss": 1.0, "test": slices(accuracy, pairs, seq_len)}
        if held_out:
            line["held_out"] = slices(held_out[epoch - 1], pairs, seq_len)
        lines.append(line | {"seconds": 3.0, "test_seconds": 0.5})
    if status:
        lines.append({"type": "end", "status": status})
    return Run(f"{model}-seed{seed}", lines)


def slices(accuracy: float, pairs: Sequence[int], seq_len: int) -> dict[str, Any]:
    by_pairs = {str(n): accuracy / (i + 1) for i, n in enumerate(pairs)}
    return {"accuracy": accuracy, "by_pairs": by_pairs, "by_length": {str(seq_len): accuracy}}


def write_record(run: Run, folder: Path) -> Path:
    """Write the record of a run into a folder named by its digest. Returns the file."""
    path = folder / run.digest / "record.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text("".join(f"{json.dumps(line)}\n" for line in run.lines))
    return path


def fake_lm_run(
    model: str,
    perplexities: Sequence[float] = (20.0, 4.0, 60.0),
    *,
    seed: int = 42,
    status: str = "done",
    sha256: str = "a" * 64,
    tokens: int = 1000,
    windows: str | None = None,
    distances: Sequence[float] | None = None,
    settings: dict[str, str] | None = None,
) -> Run:
    """A language model's run with perplexities of all, AR and non-AR tokens of the test split.

    `distances` are perplexities of AR tokens 1, 2 to 3, 4 to 7, ... tokens ago; older records have none. `settings`
    change the shipped config; `sha256` is the checksum of the text.
    """
    config = load_config(
        LMRunConfig, CONFIGS / "lm" / "enwik8.yaml", ENWIK8[model] | {"train.seed": str(seed)} | (settings or {})
    )
    parts = {
        part: {"loss": 1.0, "perplexity": value}
        for part, value in zip(("all", "ar", "non_ar"), perplexities, strict=True)
    }
    lines: list[dict[str, Any]] = [
        {
            "type": "run",
            "digest": config.digest(),
            "parameters": 34_000_000,
            "corpus": {"sha256": sha256, "tokenizer": "neox", "vocab_size": 50277, "vocabulary": NEOX_VOCABULARY},
            "config": config.model_dump(mode="json"),
            "code": CODE,
            "machine": MACHINE,
        },
        {"type": "step", "step": 5, "tokens": 163_840, "loss": 9.0, "tokens_per_second": 1000.0 + seed},
        {"type": "eval", "step": 5, "loss": 5.0, "perplexity": 150.0},
        {"type": "step", "step": 10, "tokens": 327_680, "loss": 4.0, "tokens_per_second": 1000.0 + seed},
        {"type": "end", "status": status, "step": 10, "test": {"tokens": tokens, "ar_share": 0.25, **parts}},
    ]
    if windows:
        lines[-1]["test"]["windows"] = windows
    if distances is not None:
        lines[-1]["test"]["by_distance"] = [
            {"nearest": 2**i, "farthest": 2 ** (i + 1) - 1, "tokens": 1200 + i, "loss": 1.0, "perplexity": value}
            for i, value in enumerate(distances)
        ]
    return Run(f"{model}-{seed}", lines)
