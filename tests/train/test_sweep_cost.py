"""The estimate of a sweep's time: the arithmetic, and the source of its seconds."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rebased.config import load_config
from rebased.models import LanguageModel
from rebased.runs.lm_config import LMRunConfig
from rebased.runs.shipped import CONFIGS
from rebased.train.executors.jobs import Job, Outcome
from rebased.train.kinds import workload_of
from rebased.train.sweep.cost import estimate, processor_of, short_run, time_steps
from rebased.train.sweep.grid import Point
from rebased.train.sweep.plan import make_plan
from rebased.train.synthetic.workload import epoch_work, task_work
from tiny_run import tiny


class Clock:
    """An executor that trains nothing: a multiply-add takes a microsecond, once half of it and once the double."""

    workers, gpus, where = 2, 0, "nowhere"

    def __init__(self) -> None:
        self.timed: list[dict[str, Any]] = []

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        if function is time_steps:
            self.timed.append(arguments[0])
            return [0.5e-6, 1e-6, 2e-6]
        return "this CPU" if function is processor_of else None

    def run(self, jobs: Sequence[Job], ended: Callable[[int, Outcome], None]) -> list[Outcome | None]:
        raise AssertionError

    def close(self) -> None: ...


def plan_of(folder: Path, *changes: dict[str, Any]) -> Any:
    return make_plan([Point({}, tiny(change)) for change in changes], folder, {})


def test_the_work_is_counted() -> None:
    config = tiny()
    model, tasks = LanguageModel(config.model), [config.task.task(segment) for segment in config.task.train]
    body = sum(
        p.numel() for name, p in model.named_parameters() if name.split(".")[0] not in ("embedding", "positions")
    )
    expected = 12 * (body + model.state_size(12)) + 2 * 8 * 24
    assert task_work(config.model, tasks[0]) == expected
    double = tiny({"task": {"train": {0: {"examples": 80}, 1: {"examples": 40}}}})
    trained = epoch_work(double) - epoch_work(config)
    tested = epoch_work(config) - trained
    assert trained == 3 * (40 * expected + 20 * task_work(config.model, tasks[1]))
    assert tested == sum(s.examples * task_work(config.model, config.task.task(s)) for s in config.task.test)


def test_one_timing_a_pattern_of_mixers_and_time_in_proportion_to_work(tmp_path: Path) -> None:
    clock = Clock()
    changes = [{"model": {"d_model": width}} for width in (8, 16)] + [{"model": {"mixers": ["attention", "attention"]}}]
    plan = plan_of(tmp_path, *changes)
    cost = estimate(plan.runs, plan.runs, clock)
    assert len(clock.timed) == 2
    for run in plan.runs:
        assert cost.seconds[run.digest] == pytest.approx(3 * epoch_work(run.config) * 1e-6, abs=0.01)  # 3 epochs
    assert cost.total == pytest.approx(max(sum(cost.seconds.values()) / 2, max(cost.seconds.values())))
    assert (cost.least, cost.most) == (pytest.approx(cost.total / 2), pytest.approx(2 * cost.total))
    assert "3 steps of each model, timed just now" in cost.basis


def test_records_of_the_folder_are_believed_first(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, {"train": {"seed": 1}}, {"train": {"seed": 2}})
    first = plan.runs[0]
    first.folder.mkdir()
    lines = [{"type": "epoch", "epoch": i, "seconds": 40.0, "test_seconds": 2.0} for i in (1, 2)]
    lines.append({"type": "epoch", "epoch": 3})  # a line without its seconds is not counted
    (first.folder / "record.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    plan = plan_of(tmp_path, {"train": {"seed": 1}}, {"train": {"seed": 2}})
    first, second = plan.runs
    clock = Clock()
    cost = estimate(plan.runs, plan.runs, clock)
    assert clock.timed == []
    assert cost.seconds == {first.digest: pytest.approx(42.0), second.digest: pytest.approx(126.0)}  # one epoch is left
    assert cost.total == pytest.approx(126.0)  # never less than the longest run
    assert "the records of this folder" in cost.basis


@pytest.mark.parametrize(
    ("machine", "believed"),
    [({"gpu": None, "cpu": "this CPU"}, True), ({"gpu": "another GPU", "cpu": "this CPU"}, False)],
)
def test_records_of_another_processor_are_not_believed(tmp_path: Path, machine: dict[str, Any], believed: bool) -> None:
    seeds = {"train": {"seed": 1}}, {"train": {"seed": 2}}
    first = plan_of(tmp_path, *seeds).runs[0]
    first.folder.mkdir()
    lines = [{"type": "run", "machine": machine}, {"type": "epoch", "epoch": 1, "seconds": 40.0, "test_seconds": 2.0}]
    (first.folder / "record.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    plan, clock = plan_of(tmp_path, *seeds), Clock()
    cost = estimate(plan.runs, plan.runs, clock)
    first, second = plan.runs
    assert len(clock.timed) == (not believed)
    if believed:
        assert cost.seconds == {first.digest: pytest.approx(84.0), second.digest: pytest.approx(126.0)}
    else:  # the epoch that was trained elsewhere is not trained again
        epoch = epoch_work(first.config) * 1e-6
        assert cost.seconds[first.digest] == pytest.approx(2 * epoch, abs=0.01)
        assert cost.seconds[second.digest] == pytest.approx(3 * epoch, abs=0.01)
        assert "timed just now" in cost.basis


def test_a_damaged_record_fails_its_run_alone(tmp_path: Path) -> None:
    good, bad = (tiny({"train": {"seed": seed}}) for seed in (1, 2))
    (tmp_path / bad.digest()).mkdir()
    (tmp_path / bad.digest() / "record.jsonl").write_text("{nonsense\n")
    plan = make_plan([Point({}, good), Point({}, bad)], tmp_path, {})
    assert [run.status for run in plan.runs] == ["new", "failed"]
    assert "is damaged in line 1" in str(plan.runs[1].error)
    assert f"remove {tmp_path / bad.digest()} and train the run again" in str(plan.runs[1].error)
    assert estimate(plan.runs, plan.runs, Clock()).seconds.keys() == {good.digest(), bad.digest()}


def test_steps_are_timed_in_the_loop_that_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    config = tiny()
    work = workload_of(config).step_work(config)
    assert work == 3 * 8 * task_work(config.model, config.task.task(config.task.train[0]))  # a step of one batch
    assert all(0 < 9 * work * each < 60 for each in time_steps(config.model_dump()))
    assert list(tmp_path.glob("rebased-*")) == []  # nothing is left behind


def test_a_large_language_model_is_timed_on_short_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(LMRunConfig, CONFIGS / "lm" / "enwik8.yaml", {})
    monkeypatch.setattr("rebased.train.sweep.cost.has_gpu", lambda: False)
    short = short_run(config)
    assert isinstance(short, LMRunConfig)
    assert (short.data.seq_len, short.train.batch_size) == (64, 1)
    assert short.model == config.model
    step_work = workload_of(config).step_work
    assert step_work(short) < step_work(config) / 400  # of 16 sequences of 2,048 tokens
    monkeypatch.setattr("rebased.train.sweep.cost.has_gpu", lambda: True)
    whole = short_run(config)
    assert isinstance(whole, LMRunConfig)
    assert (whole.data.seq_len, whole.train.batch_size) == (2048, 16)
