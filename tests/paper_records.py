"""Invented records on the paper's grids, for tests of the page about the paper."""

from typing import Any

from fake_records import fake_run
from rebased.report.paper.values import FIGURE_1_PAIRS
from rebased.runs.finished import Run

KERNELS = {  # the kernels of Table 1: (preset, what happens to queries and keys)
    "Based": ("based", None),
    "x²": ("rebased", "none"),
    "norm(x)²": ("rebased", "norm"),
    "(γx)²": ("rebased", "scale"),
    "(γx + β)²": ("rebased", "affine"),
    "ReBased": ("rebased", None),
}


def paper_run(
    preset: str,
    accuracy: float,
    *,
    seq_len: int = 256,
    pairs: int | None = None,
    d_model: int = 24,
    lr: float = 1e-2,
    seed: int = 42,
    epochs: int = 64,
    precision: str = "fp32",
    transform: str | None = None,
    gamma: float | None = None,
) -> Run:
    """A run on a place of the paper's grids: of Figure 1 unless `pairs` says otherwise. With `gamma` its last epoch
    has norms with this mean."""
    pairs = pairs or FIGURE_1_PAIRS[seq_len]
    segment = {"seq_len": seq_len, "kv_pairs": pairs}
    changes: dict[str, Any] = {
        "task": {
            "train": [segment | {"examples": 100_000}],
            "test": [segment | {"examples": 3000}],
            "held_out": [segment | {"examples": 3000}],
        },
        "train": {"epochs": epochs, "precision": precision},
    }
    if transform:
        changes["model"] = {"mixers": {1: {"qk_transform": transform}}}
    run = fake_run(
        preset,
        (accuracy / 2, accuracy),
        held_out=(accuracy / 2, accuracy),
        seq_len=seq_len,
        pairs=(pairs,),
        d_model=d_model,
        lr=lr,
        seed=seed,
        changes=changes,
    )
    if gamma is not None:
        for line in run.lines:
            if line["type"] == "epoch":
                entry = {"mean": gamma, "sd": 0.3, "low": -1.0, "high": 1.0, "counts": [1, 2, 3, 2]}
                shift = entry | {"mean": 0.0}
                line["norms"] = {"1": {"q.gamma": entry, "k.gamma": entry, "q.beta": shift, "k.beta": shift}}
    return run
