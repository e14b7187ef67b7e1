"""Runs that never ran: records with the accuracies that a test needs."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rebased.config import merge
from rebased.runs.finished import Run
from rebased.runs.synthetic_config import RunConfig

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
    """`held_out` are accuracies on a split of that name; `changes` are other settings of the config."""
    segments = [{"seq_len": seq_len, "kv_pairs": n, "examples": 10} for n in pairs]
    settings: dict[str, Any] = {
        "task": {"train": segments[:1], "test": segments, "held_out": segments if held_out else []},
        "model": {"preset": model, "d_model": d_model},
        "train": {"seed": seed, "epochs": 5, "lr": lr},
    }
    settings["task"] |= {"vocab_size": 64 if seq_len < 64 else 8192}
    config = RunConfig.model_validate(merge(settings, changes or {}))
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
    """As a run leaves it, in a folder with its digest for a name."""
    path = folder / run.digest / "record.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text("".join(f"{json.dumps(line)}\n" for line in run.lines))
    return path
