"""Plans and what runs say about them: decided, equal, too wide, incomplete."""

from pathlib import Path
from typing import Any

import pytest

from fake_records import fake_run
from rebased.paper.evidence import read_evidence
from rebased.paper.page import runs_made
from rebased.paper.planned import JudgedPlan, Plan, judge_plan, read_plan
from rebased.report.probe.cells import live_mean
from rebased.runs.collect import write_bundle

RESULTS = Path(__file__).parents[2] / "results"
PLANS = sorted(RESULTS.glob("*/plan.md"))
TEST = {"name": "", "value": "held_out", "a": {"model": "ReBased"}, "b": {"model": "Based"}}
HIGH, LOW = [0.70, 0.72, 0.71, 0.73, 0.69], [0.50, 0.52, 0.51, 0.53, 0.49]


def planted(tmp_path: Path, **accuracies: list[float]) -> Path:
    """A bundle of runs: by preset, one run per accuracy."""
    runs = [
        fake_run(preset, [accuracy], seed=seed, seq_len=64, held_out=[accuracy])
        for preset, values in accuracies.items()
        for seed, accuracy in enumerate(values)
    ]
    write_bundle(runs, tmp_path / "runs.jsonl.gz")
    return tmp_path / "runs.jsonl.gz"


def answer(bundle: Path, **changes: Any) -> str:
    """What the runs say about ReBased against Based."""
    plan = Plan.model_validate({"correct": "none", "tests": [TEST | {"margin": 0.1, "runs": 5} | changes]})
    return judge_plan(plan, read_evidence([bundle]))[0].answer


@pytest.mark.parametrize("test", ["welch", "permutation"])
def test_answers(tmp_path: Path, test: str) -> None:
    wide = [0.1, 0.9, 0.4, 0.7, 0.5]
    assert answer(planted(tmp_path, rebased=HIGH, based=LOW), test=test) == "holds"
    assert answer(planted(tmp_path, rebased=LOW, based=HIGH), test=test) == "contradicted"
    assert answer(planted(tmp_path, rebased=HIGH, based=HIGH), test=test) == "equal"
    assert answer(planted(tmp_path, rebased=wide, based=LOW), test=test) == "too wide to tell"
    assert answer(planted(tmp_path, rebased=HIGH[:4], based=LOW), test=test) == "incomplete"


def test_runs_that_begin(tmp_path: Path) -> None:
    none, all_ = [0.001] * 5, [0.5] * 5
    assert answer(planted(tmp_path, rebased=all_, based=none), value="began", test="fisher") == "holds"
    assert answer(planted(tmp_path, rebased=none, based=all_), value="began", test="fisher") == "contradicted"
    assert (
        answer(planted(tmp_path, rebased=[*all_[:4], 0.001], based=all_), value="began", test="fisher") == "not shown"
    )


def test_a_decision_that_welchs_test_does_not_share_is_fragile(tmp_path: Path) -> None:
    """The one group is spread 20 times as wide as the other, and half as large."""
    wide, narrow = [0.61, 0.39, 0.59, 0.84, 0.31], [0.41, 0.4, 0.41, 0.38, 0.39, 0.39, 0.4, 0.4, 0.39, 0.4]
    plan = {"correct": "none", "tests": [TEST | {"test": "permutation", "margin": 0.1, "runs": [5, 10]}]}
    (found,) = judge_plan(Plan.model_validate(plan), read_evidence([planted(tmp_path, rebased=wide, based=narrow)]))
    assert (found.answer, found.fragile) == ("holds", "fragile: Welch's test has p = 0.18")
    assert found.interval[0] > 0
    assert found.counts == ("5", "10")
    (found,) = judge_plan(Plan.model_validate(plan), read_evidence([planted(tmp_path, rebased=HIGH, based=LOW * 2)]))
    assert (found.answer, found.fragile) == ("holds", "")


def test_missing_runs_are_counted(tmp_path: Path) -> None:
    plan = {"correct": "none", "tests": [TEST | {"runs": 5}]}
    (found,) = judge_plan(Plan.model_validate(plan), read_evidence([planted(tmp_path, rebased=HIGH[:3], based=LOW)]))
    assert runs_made(JudgedPlan([found])) == "8 of 10 runs made, tested when all are"
    assert runs_made(JudgedPlan([])) == "no run made"


def test_dead_heads_do_not_count() -> None:
    assert live_mean([0.17, 0.19, 0.01, 0.0]) == pytest.approx(0.18)
    assert live_mean([0.01, 0.0]) is None


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.parent.name)
def test_committed_plans_can_be_read(path: Path) -> None:
    """Each lies beside its sweep, and states how many runs it needs."""
    assert (path.parent / "sweep.yaml").exists()
    assert read_plan(path).tests
