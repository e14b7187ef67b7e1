"""The runs that follow sweep.yaml and kernels.yaml, each model at the rate that was chosen there. See plan.md.

The environment says which: PART is a key of PARTS, and RATES names folders or bundles with the runs of both sweeps,
separated by colons. A model's rate is that of its lowest loss on the whole valid split; three must be finished.
"""

import json
import os
from itertools import product
from pathlib import Path

from rebased.runs.collect import collect

SEEDS = (42, 43, 44)
PASS = 1968 / 623  # steps of one pass over 64,506,379 tokens, in steps of the sweeps
PARTS = {  # models, length of the training and of windows, as multiples of those in the sweeps
    "models": ("models", 1, 1),
    "kernels": ("kernels", 1, 1),
    "pass": ("models", PASS, 1),
    "long": ("models", PASS, 2),
}


def chosen(paths: list[Path]) -> list[dict]:
    """The settings of each model's best run."""
    tried: dict[str, list] = {}
    for run in collect(paths).lm_runs:
        if run.lines[-1]["type"] == "end":
            tried.setdefault(json.dumps(run.settings["model"], sort_keys=True), []).append(run)
    few = [runs[0].folder for runs in tried.values() if len(runs) < 3]
    if few or not tried:
        raise ValueError(f"a model has fewer than three finished rates: {few or paths}")
    return [min(runs, key=lambda run: run.lines[-1]["valid"]["all"]["loss"]).settings for runs in tried.values()]


def is_kernel(settings: dict) -> bool:
    """Whether a model is one of kernels.yaml."""
    last = settings["model"]["mixers"][-1]
    return last["name"] == "gated_rebased" or last.get("qk_transform") in ("none", "norm", "scale")


def variant(settings: dict, seed: int, longer: float, wider: int) -> dict:
    """The settings with another seed, number of steps and length of windows, at the same tokens per step."""
    data, model, train = settings["data"], settings["model"], settings["train"]
    steps = round(train["steps"] * longer)
    every = {"eval_every": max(1, steps // 7), "checkpoint_every": steps}
    batch = {"batch_size": train["batch_size"] // wider, "steps": steps, "seed": seed}
    return {
        "data": data | {"seq_len": data["seq_len"] * wider},
        "model": model | {"max_len": data["seq_len"] * wider},
        "train": train | batch | every,
    }


group, longer, wider = PARTS[os.environ["PART"]]
found = [
    settings
    for settings in chosen([Path(path) for path in os.environ["RATES"].split(":")])
    if is_kernel(settings) == (group == "kernels")
]
configs = [variant(settings, seed, longer, wider) for seed, settings in product(SEEDS, found)]
