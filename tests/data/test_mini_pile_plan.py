"""The plans of the mini-pile: their tests find the runs that the committed sweeps make, three or six per model."""

import json
import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rebased.paper.plan_file import read_plan
from rebased.paper.planned import describes
from rebased.runs.finished import Run
from rebased.train.sweep.grid import load_sweep

FOLDER = Path(__file__).parents[2] / "results" / "mini-pile"
BEST = 1.5e-3
PARTS = ("models", "kernels", "delta", "pass", "long", "new-seeds", "square")


def record_of(settings: dict[str, Any], lr: float, best: float = BEST) -> list[dict[str, Any]]:
    """A run that ended, as far as a plan looks at it."""
    config = settings | {"train": settings["train"] | {"lr": lr}}
    loss = 3.0 + (lr != best)
    return [
        {"type": "run", "digest": json.dumps(config), "config": config},
        {"type": "end", "status": "done", "valid": {"all": {"loss": loss}}, "test": {"all": {"loss": loss}}},
    ]


def runs_of_rates(best: float = BEST) -> list[Run]:
    """The runs of the sweeps over rates, of which one rate is best."""
    sweeps = ("sweep.yaml", "kernels.yaml", "delta.yaml", "dressed.yaml", "square.yaml")
    points = [point.config for name in sweeps for point in load_sweep(FOLDER / name, {}).points]
    assert len(points) == 45
    return [Run("", record_of(config.model_dump(mode="json"), config.train.lr, best)) for config in points]


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, list[Run]], list[dict[str, Any]]]:
    """Ask then.py for the settings of a part's runs, after these runs."""

    def asked(part: str, runs: list[Run]) -> list[dict[str, Any]]:
        monkeypatch.setattr("rebased.runs.collect.collect", lambda paths: SimpleNamespace(lm_runs=runs))
        monkeypatch.setenv("RATES", "runs")
        monkeypatch.setenv("PART", part)
        configs: list[dict[str, Any]] = runpy.run_path(str(FOLDER / "then.py"))["configs"]
        return configs

    return asked


@pytest.fixture
def following(ask: Callable[..., list[dict[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
    """By part, the settings of the runs that then.py asks for after the sweeps over rates."""
    return {part: ask(part, runs_of_rates()) for part in PARTS}


@pytest.mark.parametrize(("best", "more"), [(4.5e-3, 1.35e-2), (5e-4, 5e-4 / 3)])
def test_a_best_rate_at_an_edge_asks_for_one_more_first(
    best: float, more: float, ask: Callable[..., list[dict[str, Any]]]
) -> None:
    runs = runs_of_rates(best)
    with pytest.raises(ValueError, match="first PART=edge"):
        ask("models", runs)
    edge = ask("edge", runs)
    assert [config["train"]["lr"] for config in edge] == pytest.approx([more] * 15)
    assert {config["train"]["seed"] for config in edge} == {41}
    made = [*runs, *(Run("", record_of(config, config["train"]["lr"], best)) for config in edge)]
    with pytest.raises(ValueError, match="no model's best rate is at an edge"):
        ask("edge", made)  # one more, and not another one after it
    assert {config["train"]["lr"] for config in ask("models", made)} == {best}
    better = [*runs, *(Run("", record_of(config, lr := config["train"]["lr"], lr)) for config in edge)]
    for run in better[:45]:
        run.lines[-1]["valid"]["all"]["loss"] = 4.0
    assert {config["train"]["lr"] for config in ask("models", better)} == {edge[0]["train"]["lr"]}


def test_no_rate_is_asked_for_where_the_best_is_in_the_middle(ask: Callable[..., list[dict[str, Any]]]) -> None:
    with pytest.raises(ValueError, match="no model's best rate is at an edge"):
        ask("edge", runs_of_rates())


def test_each_model_is_trained_at_its_best_rate_with_new_seeds(following: dict[str, list[dict[str, Any]]]) -> None:
    assert [len(runs) for runs in following.values()] == [12, 12, 9, 12, 12, 30, 12]
    trained = [run["train"] for runs in following.values() for run in runs]
    assert {train["lr"] for train in trained} == {BEST}
    assert {train["seed"] for train in trained} == {*range(42, 57)}
    tokens = {run["train"]["batch_size"] * run["data"]["seq_len"] for runs in following.values() for run in runs}
    assert tokens == {32_768}


@pytest.mark.parametrize(
    ("plan", "parts", "count"),
    [
        ("plan", ["models"], 9),
        ("kernels", ["models", "kernels"], 8),
        ("delta", ["models", "delta"], 6),
        ("pass", ["pass"], 9),
        ("long", ["long"], 9),
        ("new-seeds", ["new-seeds"], 6),
        ("square", ["new-seeds", "square"], 4),
    ],
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
            found = [part for part, run in runs if describes(which, run)]
            assert len(found) == test.runs
            assert set(found) <= set(parts)
