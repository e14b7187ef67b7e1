"""The local executor: runs trained at once, and what happens to the others when one fails."""

import contextlib
import multiprocessing
import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from rebased.runs.record import read_record
from rebased.train import RunResult, RunStart, Sink, StepReport
from rebased.train.executors.jobs import Failed, Job, Outcome
from rebased.train.executors.local import LocalExecutor, visible_gpu
from tiny_run import tiny


def train_all(jobs: list[Job], workers: int) -> list[Outcome | None]:
    """Run the jobs. `ended` must be called exactly once per job that has an outcome."""
    reported: dict[int, Outcome] = {}

    def ended(index: int, outcome: Outcome) -> None:
        assert index not in reported
        reported[index] = outcome

    outcomes = LocalExecutor(workers).run(jobs, ended)
    assert {i: outcome for i, outcome in enumerate(outcomes) if outcome is not None} == reported
    return outcomes


class Events(Sink):
    def __init__(self) -> None:
        self.events: list[str] = []

    def start(self, run: RunStart) -> None:
        self.events.append(f"start at {run.step} of {run.steps}")

    def step(self, report: StepReport) -> None:
        self.events.append("step")

    def line(self, line: dict[str, Any]) -> None:
        self.events.append(line["type"])

    def end(self, line: dict[str, Any]) -> None:
        self.events.append(line["status"])


def test_results_come_in_order_and_sinks_receive_everything(tmp_path: Path) -> None:
    jobs = [Job(tiny({"train": {"seed": seed}}), tmp_path / str(seed), Events()) for seed in range(3)]
    results = train_all(jobs, workers=2)
    for job, result in zip(jobs, results, strict=True):
        assert isinstance(result, RunResult)
        assert (result.status, result.folder) == ("done", job.folder)
        assert result.accuracy == read_record(job.folder)[-1]["accuracy"]
        assert isinstance(job.sink, Events)
        assert job.sink.events[0] == f"start at 0 of {result.step}"
        assert job.sink.events.count("step") == result.step
        assert job.sink.events.count("epoch") == 3
        assert job.sink.events[-1] == "done"
    again = train_all(jobs, workers=2)
    assert [getattr(result, "status", None) for result in again] == ["already_done"] * 3
    assert multiprocessing.active_children() == []


class Kill(Sink):
    """Kills the process of the run when it has saved a checkpoint, `times` times."""

    def __init__(self, times: int) -> None:
        self.times, self.starts = times, list[int]()

    def start(self, run: RunStart) -> None:
        self.starts.append(run.step)

    def saved(self, step: int) -> None:
        if self.times:
            self.times -= 1
            for process in multiprocessing.active_children():
                assert process.pid is not None
                os.kill(process.pid, signal.SIGKILL)


def test_a_run_whose_process_is_killed_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    sink = Kill(times=2)
    (outcome,) = train_all([Job(tiny({"train": {"epochs": 20, "stop_above": 1}}), tmp_path / "run", sink)], workers=1)
    assert isinstance(outcome, RunResult)
    assert outcome.status == "done"
    assert len(sink.starts) == 3
    assert 0 == sink.starts[0] < sink.starts[1] < sink.starts[2]
    epochs = [line["epoch"] for line in read_record(tmp_path / "run") if line["type"] == "epoch"]
    assert epochs == list(range(1, 21))


def test_a_process_that_dies_again_and_again_is_named(tmp_path: Path) -> None:
    job = Job(tiny({"train": {"epochs": 500, "stop_above": 1}}), tmp_path / "run", Kill(times=99))
    (outcome,) = train_all([job], workers=1)
    assert isinstance(outcome, Failed)
    assert "run ended 3 times, the last time with exit code -9" in outcome.error
    assert "command" not in outcome.error  # a sweep needs --retry-failed, and says so
    assert multiprocessing.active_children() == []


def second_finds_no_memory(counted: Path) -> None:
    """A `prepare` that raises an error in the second process that calls it."""
    for number in range(1, 4):
        with contextlib.suppress(FileExistsError):
            (counted / str(number)).mkdir(parents=True)
            break
    if number == 2:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


@pytest.mark.parametrize("workers", [1, 2])
def test_a_run_without_gpu_memory_is_tried_again_alone(tmp_path: Path, workers: int) -> None:
    """Once, after all others; if it was alone already, it has failed."""
    settings = {"epochs": 6, "stop_above": 1}
    jobs = [Job(tiny({"train": settings | {"seed": seed}}), tmp_path / str(seed), Sink()) for seed in range(2)]
    counted, ended = tmp_path / "counted", list[int]()
    executor = LocalExecutor(workers, prepare=partial(second_finds_no_memory, counted))
    outcomes = executor.run(jobs, lambda index, outcome: ended.append(index))
    assert sorted(ended) == [0, 1]
    if workers == 1:
        assert outcomes[1] == Failed("OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", memory=True)
    else:
        assert [getattr(outcome, "status", None) for outcome in outcomes] == ["done", "done"]
    assert len(list(counted.iterdir())) == (2 if workers == 1 else 3)


def test_a_failure_does_not_stop_the_others(tmp_path: Path) -> None:
    bad = Job(tiny({"train": {"lr": 1e30, "eps": 1e-30}}), tmp_path / "bad", Sink())
    good = Job(tiny(), tmp_path / "good", Sink())
    failed, done = train_all([bad, good], workers=1)
    assert isinstance(failed, Failed)
    assert "Try a lower rate" in failed.error
    assert isinstance(done, RunResult)
    assert read_record(tmp_path / "bad")[-1]["status"] == "diverged"


def test_what_the_listener_raises_ends_and_saves_the_others(tmp_path: Path) -> None:
    long = Job(tiny({"train": {"epochs": 500, "stop_above": 1}}), tmp_path / "long", Sink())
    short = Job(tiny({"train": {"epochs": 1}}), tmp_path / "short", Sink())

    def ended(index: int, outcome: Outcome) -> None:
        raise ValueError(f"job {index} has ended")

    with pytest.raises(ValueError, match="job 1 has ended"):
        LocalExecutor(2).run([long, short], ended)
    assert multiprocessing.active_children() == []
    if (tmp_path / "long" / "record.jsonl").exists():  # it may have ended before that
        assert not any(line["type"] == "end" for line in read_record(tmp_path / "long"))


def ignore_sigterm(caller: int) -> None:
    """A `prepare` that ignores SIGTERM, sends Ctrl-C to the caller and then sleeps."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.kill(caller, signal.SIGINT)
    time.sleep(600)


def test_ctrl_c_is_reported_at_once_and_the_second_one_ends_everything(tmp_path: Path) -> None:
    reported: list[int] = []

    def stopping(runs: int) -> None:
        reported.append(runs)
        os.kill(os.getpid(), signal.SIGINT)

    executor = LocalExecutor(1, prepare=partial(ignore_sigterm, os.getpid()))
    jobs = [Job(tiny({"train": {"seed": seed}}), tmp_path / str(seed), Sink()) for seed in range(2)]
    with pytest.raises(KeyboardInterrupt):
        executor.run(jobs, lambda index, outcome: None, stopping)
    assert reported == [1]
    assert multiprocessing.active_children() == []


def fails() -> None:
    raise ValueError("not here")


def test_a_call_is_answered_where_a_run_would_be() -> None:
    executor = LocalExecutor(1)
    assert executor.call(os.getpid) != os.getpid()
    with pytest.raises(ValueError, match="not here"):
        executor.call(fails)


def die_with_a_child(pid_file: Path) -> None:
    """End this process by a signal, after it has started one that holds the same pipe open."""
    child = os.fork()
    if child == 0:
        time.sleep(600)
    pid_file.write_text(str(child))
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_lost_process_is_noticed_though_its_pipe_stays_open(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a worker process ended with exit code -9 before it returned a result"):
        LocalExecutor(1).call(die_with_a_child, tmp_path / "pid")
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)  # raises unless it still runs


def sleep_and_say_when_it_ends(said: Path) -> None:
    said.write_text("begun")
    try:
        time.sleep(60)
    finally:
        said.write_text("ended")


def wait_for(said: Path, word: str) -> None:
    deadline = time.monotonic() + 60
    while not said.exists() or said.read_text() != word:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_call_ends_when_its_caller_is_killed(tmp_path: Path) -> None:
    said = tmp_path / "said"
    caller = multiprocessing.get_context("forkserver").Process(
        target=LocalExecutor(1).call, args=(sleep_and_say_when_it_ends, said)
    )
    caller.start()
    wait_for(said, "begun")
    caller.kill()
    wait_for(said, "ended")
    caller.join()


def test_workers_share_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three workers share the two GPUs that the user has left visible."""
    monkeypatch.setattr("rebased.train.executors.local.gpu_count", lambda: 2)
    assert LocalExecutor(uses_gpu=True).workers == 2
    assert LocalExecutor(3, uses_gpu=False).gpus == 0
    executor = LocalExecutor(3, uses_gpu=True)
    assert executor.where == "3 processes of this machine on 2 GPUs"
    for listed, seen in ((None, ["0", "1", "0"]), ("5,7", ["5", "7", "5"])):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if listed:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
        assert [visible_gpu(slot % executor.gpus) for slot in range(3)] == seen
