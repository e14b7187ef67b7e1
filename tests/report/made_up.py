"""Runs that never ran: records with the accuracies that a test needs."""

from collections.abc import Sequence
from typing import Any

from rebased.report import Run
from rebased.train import RunConfig

MACHINE = {"cpu": "A CPU", "cores": 2, "threads": 1, "gpu": None, "system": "Linux", "python": "3.11", "torch": "2.9"}
CODE = {"version": "0.1.0", "commit": "0123456789abcdef", "dirty": False}


def made_up(
    model: str = "rebased", accuracies: Sequence[float] = (0.1, 0.5), *, seed: int = 42, pairs: Sequence[int] = (4,)
) -> Run:
    segments = [{"seq_len": 32, "kv_pairs": n, "examples": 10} for n in pairs]
    config = RunConfig.model_validate(
        {
            "task": {"vocab_size": 64, "train": segments[:1], "test": segments},
            "model": {"preset": model, "d_model": 24},
            "train": {"seed": seed, "epochs": 5},
        }
    )
    lines: list[dict[str, Any]] = [
        {
            "type": "run",
            "digest": config.digest(),
            "parameters": 1234,
            "config": config.model_dump(mode="json"),
            "code": CODE,
            "machine": MACHINE,
        }
    ]
    for epoch, accuracy in enumerate(accuracies, start=1):
        by_pairs = {str(n): accuracy / (i + 1) for i, n in enumerate(pairs)}
        test = {"accuracy": accuracy, "by_pairs": by_pairs, "by_length": {"32": accuracy}}
        lines.append({"type": "epoch", "epoch": epoch, "loss": 1.0, "test": test, "seconds": 3.0, "test_seconds": 0.5})
    return Run(f"{model}-seed{seed}", lines)
