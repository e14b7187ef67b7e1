"""Runs on Ray, or on a fake Ray: killed runs are resumed, nothing is lost, and no run is reported twice."""

import os
import signal
import socket
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import fake_ray
from rebased.runs.record import read_record
from rebased.train import RunResult, Sink
from rebased.train.executors.jobs import Job, Outcome
from rebased.train.executors.ray_cluster import RayExecutor
from tiny_run import tiny

EPOCHS = (40, 3)  # the first run is long enough to be killed in the middle


@pytest.fixture(params=["stand-in", "ray"])
def _ray(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake Ray, and Ray itself where it is installed (`make test-all` installs it)."""
    if request.param == "ray":
        pytest.importorskip("ray")
    else:
        monkeypatch.setitem(sys.modules, "ray", fake_ray)


def write_pid(path: Path) -> None:
    """A `prepare` that appends the process id of the worker to a file."""
    with open(path, "a") as file:
        file.write(f"{os.getpid()}\n")


class OnFirstEpoch(Sink):
    def __init__(self, action: Any) -> None:
        self.action, self.epochs = action, list[int]()

    def line(self, line: dict[str, Any]) -> None:
        assert line["type"] == "epoch"
        self.epochs.append(line["epoch"])
        if len(self.epochs) == 1:
            self.action()


def epochs_of(folder: Path) -> list[int]:
    return [line["epoch"] for line in read_record(folder) if line["type"] == "epoch"]


@pytest.mark.usefixtures("_ray")
def test_killed_workers_and_ctrl_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pids = tmp_path / "pids"
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # workers import this file too
    monkeypatch.setenv("RAY_worker_niceness", "0")  # else workers wait for other processes of this machine
    executor = RayExecutor(1, prepare=partial(write_pid, pids))
    try:
        assert executor.where.startswith("1 at a time on a Ray cluster of 1 node")
        assert executor.call(os.getpid) == int(pids.read_text())
        pids.unlink()

        reported = list[tuple[int, Outcome]]()
        kill = OnFirstEpoch(lambda: [os.kill(int(pid), signal.SIGKILL) for pid in pids.read_text().split()])
        jobs = [
            Job(tiny({"train": {"epochs": epochs, "stop_above": 1}}), tmp_path / f"run-{epochs}", sink)
            for epochs, sink in zip(EPOCHS, (kill, Sink()), strict=True)
        ]
        outcomes = executor.run(jobs, lambda index, outcome: reported.append((index, outcome)))
        assert [getattr(outcome, "status", outcome) for outcome in outcomes] == ["done", "done"]
        assert sorted(reported) == list(enumerate(outcomes))  # each once
        assert len(set(pids.read_text().split())) > 1  # another process resumed it
        for job, epochs in zip(jobs, EPOCHS, strict=True):
            assert epochs_of(job.folder) == list(range(1, epochs + 1))

        interrupt = OnFirstEpoch(lambda: os.kill(os.getpid(), signal.SIGINT))
        long = {"epochs": 100_000, "stop_above": 1}
        jobs = [Job(tiny({"train": {**long, "seed": seed}}), tmp_path / f"long-{seed}", interrupt) for seed in range(2)]
        outcomes = executor.run(jobs, lambda index, outcome: None)
        first, second = outcomes
        assert isinstance(first, RunResult)
        assert first.status == "interrupted"
        assert (jobs[0].folder / "checkpoint.json").exists()
        assert second is None  # it had not begun
    finally:
        executor.close()


def test_ray_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # importing it raises ImportError
    with pytest.raises(ValueError, match=r"--executor ray needs Ray, .*: pip install 'rebased\[sweep\]'"):
        RayExecutor()


@pytest.mark.usefixtures("_ray")
def test_a_cluster_that_does_not_answer_is_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # the port is taken, but nothing listens
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        for value in (address, f"ray://{address}"):
            monkeypatch.setenv("RAY_ADDRESS", value)
            with pytest.raises(
                ValueError, match=f"no Ray cluster answers at RAY_ADDRESS={value}: .*refused.*ray start"
            ):
                RayExecutor()
