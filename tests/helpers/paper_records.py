"""Invented records on the paper's grids, for tests of the page about the paper."""

from typing import Any

from fake_records import CODE, MACHINE, fake_run
from rebased.paper.values import FIGURE_1_PAIRS
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
    model: dict[str, Any] | None = None,
) -> Run:
    """A run on a place of the paper's grids: of Figure 1 unless `pairs` says otherwise. With `gamma` its last epoch
    has norms with this mean. `model` are settings of the model."""
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
        model = {"mixers": {1: {"qk_transform": transform}}}
    if model:
        changes["model"] = model
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
                line["step"] = 196 * line["epoch"]
                line["norms"] = {"1": {"q.gamma": entry, "k.gamma": entry, "q.beta": shift, "k.beta": shift}}
    return run


FIXED = {"model": {"mixers": {0: "previous_token"}}}


def probe_record(
    model: str,
    iou: float,
    *,
    seed: int = 42,
    accuracy: float = 0.957,
    pairs: int = 32,
    changes: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """A probe of a model with this IoU, on the task of Table 3 unless `pairs` says otherwise."""
    run = fake_run(model, seed=seed, seq_len=128, pairs=(pairs,), d_model=48, changes=FIXED | (changes or {}))
    measure = {"mean": iou, "interval": [iou - 0.01, iou + 0.01], "best": 2 * iou, "best_interval": [None, None]}
    drawn = {"queries": [4, 6], "targets": [1, 3], "mean": [[0, 9000, 0, 1000]] * 2, "best": [[0, 10000, 0, 0]] * 2}
    layer = {
        "layer": 1,
        "mixer": model,
        "heads": 2,
        "best_head": 1,
        "matrix_iou": iou,
        "drawn": [drawn],
        **{name: measure | {"by_head": [0.0, 2 * iou]} for name in ("iou", "mass", "entropy", "noisy")},
        "matrix_iou_interval": [0.0, 1.0],
        "similarity": None,
    }
    return {
        "type": "probe",
        "kind": "task",
        "folder": run.folder,
        "digest": run.digest,
        "model": run.model,
        "parameters": 1,
        "config": run.settings,
        "code": CODE,
        "machine": MACHINE,
        "split": "test",
        "examples": 9,
        "accuracy": accuracy,
        "seq_len": 128,
        "context": 4,
        "layers": [layer],
        "not_drawn": None,
    }
