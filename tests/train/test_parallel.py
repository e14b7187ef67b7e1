"""Runs side by side: the same runs as one by one, and what becomes of the others when one ends badly."""

import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from tiny_run import tiny

from rebased.train import RunStart, Sink, StepReport, read_record
from rebased.train.parallel import Job, train_all


class Heard(Sink):
    def __init__(self) -> None:
        self.events: list[str] = []

    def start(self, run: RunStart) -> None:
        self.events.append(f"start at {run.step} of {run.steps}")

    def step(self, report: StepReport) -> None:
        self.events.append("step")

    def epoch(self, line: dict[str, Any]) -> None:
        self.events.append("epoch")

    def end(self, line: dict[str, Any]) -> None:
        self.events.append(line["status"])


def test_results_come_in_order_and_sinks_hear_everything(tmp_path: Path) -> None:
    jobs = [Job(tiny({"train": {"seed": seed}}), tmp_path / str(seed), Heard()) for seed in range(3)]
    results = train_all(jobs, workers=2)
    for job, result in zip(jobs, results, strict=True):
        assert result is not None
        assert (result.status, result.folder) == ("done", job.folder)
        assert result.accuracy == read_record(job.folder)[-1]["accuracy"]
        assert isinstance(job.sink, Heard)
        assert job.sink.events[0] == f"start at 0 of {result.step}"
        assert job.sink.events.count("step") == result.step
        assert job.sink.events.count("epoch") == 3
        assert job.sink.events[-1] == "done"
    again = train_all(jobs, workers=2)
    assert [result.status for result in again if result] == ["already_done"] * 3
    assert multiprocessing.active_children() == []


class KillOne(Sink):
    def step(self, report: StepReport) -> None:
        for process in multiprocessing.active_children():
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)


def test_a_process_that_dies_is_named(tmp_path: Path) -> None:
    job = Job(tiny({"train": {"epochs": 500, "stop_above": 1}}), tmp_path / "run", KillOne())
    with pytest.raises(ValueError, match=r"run ended with exit code -9 .*run the same command again to go on"):
        train_all([job], workers=1)
    assert multiprocessing.active_children() == []


def test_an_error_of_one_is_raised_and_the_others_are_saved(tmp_path: Path) -> None:
    good = Job(tiny({"train": {"epochs": 500, "stop_above": 1}}), tmp_path / "good", Sink())
    bad = Job(tiny({"train": {"lr": 1e30, "eps": 1e-30}}), tmp_path / "bad", Sink())
    with pytest.raises(ValueError, match="Try a lower rate"):
        train_all([good, bad], workers=2)
    assert multiprocessing.active_children() == []
    assert read_record(tmp_path / "bad")[-1]["status"] == "diverged"
    if (tmp_path / "good" / "record.jsonl").exists():  # it may not have come so far
        assert not any(line["type"] == "end" for line in read_record(tmp_path / "good"))
