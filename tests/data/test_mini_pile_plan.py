"""The plans of the mini-pile: their tests find the runs that the committed sweeps make, three per model."""

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from rebased.paper.planned import fits, read_plan
from rebased.runs.finished import Run
from rebased.train.sweep.grid import load_sweep

FOLDER = Path(__file__).parents[2] / "results" / "mini-pile"
BEST = 1.5e-3


def record_of(settings: dict[str, Any], lr: float) -> list[dict[str, Any]]:
    """A run that ended, as far as a plan looks at it."""
    config = settings | {"train": settings["train"] | {"lr": lr}}
    loss = 3.0 + (lr != BEST)
    return [
        {"type": "run", "digest": json.dumps(config), "config": config},
        {"type": "end", "status": "done", "valid": {"all": {"loss": loss}}, "test": {"all": {"loss": loss}}},
    ]


@pytest.fixture
def following(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[dict[str, Any]]]:
    """By part, the settings of the runs that then.py asks for after the two sweeps over rates."""
    points = [point.config for name in ("sweep.yaml", "kernels.yaml") for point in load_sweep(FOLDER / name, {}).points]
    assert len(points) == 24
    runs = [Run("", record_of(config.model_dump(mode="json"), config.train.lr)) for config in points]

    class Found:
        lm_runs = runs

    monkeypatch.setattr("rebased.runs.collect.collect", lambda paths: Found)
    monkeypatch.setenv("RATES", "runs")
    found = {}
    for part in ("models", "kernels", "pass", "long"):
        monkeypatch.setenv("PART", part)
        found[part] = runpy.run_path(str(FOLDER / "then.py"))["configs"]
    return found


def test_each_model_is_trained_at_its_best_rate_with_new_seeds(following: dict[str, list[dict[str, Any]]]) -> None:
    assert [len(runs) for runs in following.values()] == [12] * 4
    trained = [run["train"] for runs in following.values() for run in runs]
    assert {train["lr"] for train in trained} == {BEST}
    assert {train["seed"] for train in trained} == {42, 43, 44}
    tokens = {run["train"]["batch_size"] * run["data"]["seq_len"] for runs in following.values() for run in runs}
    assert tokens == {32_768}


@pytest.mark.parametrize(
    ("plan", "parts", "count"),
    [("plan", ["models"], 9), ("kernels", ["models", "kernels"], 8), ("pass", ["pass", "long"], 18)],
)
def test_planned_tests_find_their_runs(
    plan: str, parts: list[str], count: int, following: dict[str, list[dict[str, Any]]]
) -> None:
    """Among the runs of all parts, so that no test takes those of another length."""
    tests = read_plan(FOLDER / f"{plan}.md").tests
    assert len(tests) == count
    runs = [(part, Run("", record_of(run, run["train"]["lr"]))) for part, each in following.items() for run in each]
    for test in tests:
        for which in (test.a, test.b):
            found = [part for part, run in runs if all(fits(run, key, value) for key, value in which.items())]
            assert len(found) == 3
            assert set(found) <= set(parts)
