"""The runs that follow sweep.yaml, kernels.yaml, delta.yaml, dressed.yaml and square.yaml, at the rates chosen there.
See plan.md.

The environment says which: PART is "edge" or a key of PARTS, and RATES names folders or bundles with the runs of these
sweeps and of part edge, separated by colons. A model's rate is that of its lowest loss on the whole valid split; three
must be finished. If it is the largest or smallest of the three, part edge has one more, three times as large or small,
and all other parts are refused until it is finished.
"""

import json
import os
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import NamedTuple

from rebased.runs.collect import collect

PASS = 1968 / 623  # steps of one pass over 64,506,379 tokens, in steps of the sweeps


def group_of(settings: dict) -> str:
    """The sweep that a model is of: models (sweep.yaml), kernels, delta, dressed or square."""
    last = settings["model"]["mixers"][-1]
    if last.get("decay") == "softplus":
        return "square"
    if last["name"] in ("delta_rebased", "gated_delta_net"):
        return "dressed" if last["conv_width"] else "delta"
    kernel = last["name"] == "gated_rebased" or last.get("qk_transform") in ("none", "norm", "scale")
    return "kernels" if kernel else "models"


def is_gated_or_modern(settings: dict) -> bool:
    """True for the models of new-seeds.md: delta rules with a gate, and the modern Transformer."""
    last = settings["model"]["mixers"][-1]
    return bool(last["gate"] if group_of(settings) in ("delta", "dressed") else last.get("rotary"))


class Part(NamedTuple):
    """Some models' runs; the length of the training and of windows as multiples of those in the sweeps."""

    has: Callable[[dict], bool]
    longer: float = 1
    wider: int = 1
    seeds: tuple[int, ...] = (42, 43, 44)


PARTS = {
    "models": Part(lambda settings: group_of(settings) == "models"),
    "kernels": Part(lambda settings: group_of(settings) == "kernels"),
    "delta": Part(lambda settings: group_of(settings) == "delta"),
    "pass": Part(lambda settings: group_of(settings) == "models", longer=PASS),
    "long": Part(lambda settings: group_of(settings) == "models", longer=PASS, wider=2),
    "new-seeds": Part(is_gated_or_modern, seeds=(45, 46, 47, 48, 49, 50)),
    "square": Part(lambda settings: group_of(settings) == "square", seeds=(51, 52, 53, 54, 55, 56)),
}


def tried(paths: list[Path]) -> list[list[dict]]:
    """The settings of each model's finished runs, the lowest loss first."""
    found: dict[str, list] = {}
    for run in collect(paths).lm_runs:
        if run.lines[-1]["type"] == "end":
            found.setdefault(json.dumps(run.settings["model"], sort_keys=True), []).append(run)
    few = [runs[0].folder for runs in found.values() if len(runs) < 3]
    if few or not found:
        raise ValueError(f"a model has fewer than three finished rates: {few or paths}")

    def loss(run) -> float:  # of a run that diverged: none
        return run.lines[-1]["valid"]["all"]["loss"] if "valid" in run.lines[-1] else float("inf")

    return [[run.settings for run in sorted(runs, key=loss)] for runs in found.values()]


def beyond(runs: list[dict]) -> float | None:
    """The rate that a model still needs; None if its best one of three is in the middle, or it has a fourth."""
    rates = [run["train"]["lr"] for run in runs]
    if len(rates) > 3 or rates[0] not in (min(rates), max(rates)):
        return None
    return rates[0] * 3 if rates[0] == max(rates) else rates[0] / 3


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


def following(part: str, models: list[list[dict]]) -> list[dict]:
    """The runs of a part. ValueError if a model that it has still needs a rate."""
    if part == "edge":
        more = [(runs[0], rate) for runs in models if (rate := beyond(runs)) is not None]
        if not more:
            raise ValueError("no model's best rate is at an edge: go on with the other parts")
        return [settings | {"train": settings["train"] | {"lr": rate}} for settings, rate in more]
    has, longer, wider, seeds = PARTS[part]
    models = [runs for runs in models if has(runs[0])]
    if missing := [beyond(runs) for runs in models if beyond(runs) is not None]:
        raise ValueError(f"the best rate of {len(missing)} models is at an edge; first PART=edge (rates {missing})")
    return [variant(runs[0], seed, longer, wider) for seed, runs in product(seeds, models)]


configs = following(os.environ["PART"], tried([Path(path) for path in os.environ["RATES"].split(":")]))
