"""Several processes train like one, resume each other's checkpoints, and do not wait for a process that is gone."""

import os
import signal
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from rebased.config import merge
from rebased.models.weights import load_model
from rebased.runs.lm_config import LMRunConfig
from rebased.runs.record import read_record
from rebased.train import lifecycle, train
from rebased.train.lm.workload import LMWorkload
from rebased.train.workload import Workload
from rebased.train.world import ReportedElsewhere, World
from tiny_lm_run import losses, run, start_world, tiny, wait, write_text
from tiny_run import AtStep
from tolerances import TRAINED, assert_same_weights

SHORT: dict[str, Any] = {"train": {"steps": 6, "micro_batch": 1, "eval_every": 3, "checkpoint_every": 100}}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("data") / "text")


def config_of(text: Path, parallel: str, changes: dict[str, Any] | None = None) -> LMRunConfig:
    return tiny(text, merge(merge(SHORT, {"train": {"parallel": parallel}}), changes or {}))


@pytest.fixture(scope="module")
def alone(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run in one process."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    train(config_of(text, "ddp"), folder)
    return folder


def assert_same_run(folder: Path, alone: Path) -> None:
    assert losses(folder) == pytest.approx(losses(alone), rel=TRAINED)
    ours, theirs = dict(load_model(folder).named_parameters()), dict(load_model(alone).named_parameters())
    assert_same_weights([ours[name] for name in theirs], theirs.values())
    measured, expected = (read_record(path)[-1]["valid"] for path in (folder, alone))
    assert measured["tokens"] == expected["tokens"]
    assert measured["ar"]["loss"] == pytest.approx(expected["ar"]["loss"], rel=TRAINED)
    assert measured["by_distance"] == [pytest.approx(each, rel=TRAINED) for each in expected["by_distance"]]


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_have_the_losses_of_one(text: Path, alone: Path, tmp_path: Path, parallel: str) -> None:
    assert wait(start_world(2, run, config_of(text, parallel), tmp_path / "run")) == [0, 0]
    record = read_record(tmp_path / "run")
    assert [(line["type"], line.get("step")) for line in record] == [
        (line["type"], line.get("step")) for line in read_record(alone)
    ]
    assert record[0]["processes"] == 2
    assert_same_run(tmp_path / "run", alone)


def test_the_workload_is_gone_when_the_world_is_left(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else DistributedDataParallel would be the last to hold the processes' group, and torch, which ends its threads
    then, would sometimes wait for one of them forever: it holds the interpreter's lock that the thread needs."""
    built: list[weakref.ref[Workload]] = []
    build = LMWorkload.__init__

    def build_and_watch(self: LMWorkload, config: LMRunConfig, world: World) -> None:
        built.append(weakref.ref(self))
        build(self, config, world)

    @contextmanager
    def join(device: str, processes: int) -> Iterator[World]:
        yield World(0, 1, torch.device("cpu"))
        assert [workload() for workload in built] == [None]

    monkeypatch.setattr(LMWorkload, "__init__", build_and_watch)
    monkeypatch.setattr(lifecycle, "join_world", join)
    train(config_of(text, "ddp"), tmp_path / "run")
    assert built


def stopped(config: LMRunConfig, folder: Path, rank: str) -> None:
    """One process is asked to stop between two lines of the record: all processes stop at the next line."""
    act = AtStep(2, lambda: os.kill(os.getpid(), signal.SIGTERM))
    result = train(config, folder, sinks=[act])
    assert result.status == "interrupted"
    assert result.step == 3
    assert result.is_rank_zero == (os.environ["RANK"] == rank)


def test_a_checkpoint_of_two_shards_goes_on_in_one_process(text: Path, alone: Path, tmp_path: Path) -> None:
    config = config_of(text, "fsdp")
    assert wait(start_world(2, stopped, config, tmp_path / "run", "0")) == [0, 0]
    assert (tmp_path / "run" / "checkpoint-3.pt").exists()  # rank 0 wrote the shards of both
    assert train(config, tmp_path / "run", resume=True).status == "done"
    assert [line["processes"] for line in read_record(tmp_path / "run") if "processes" in line] == [2, 1]
    assert_same_run(tmp_path / "run", alone)


def test_a_checkpoint_of_one_process_goes_on_in_two_shards(text: Path, alone: Path, tmp_path: Path) -> None:
    """A run of one process is resumed by several, with other micro batches."""
    config = config_of(text, "none", {"train": {"micro_batch": 4}})
    act = AtStep(4, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert train(config, tmp_path / "run", sinks=[act]).status == "interrupted"
    assert wait(start_world(2, run, config_of(text, "fsdp"), tmp_path / "run", True)) == [0, 0]
    how = [line["execution"] for line in read_record(tmp_path / "run") if line["type"] in ("run", "resume")]
    assert [(each["parallel"], each["micro_batch"]) for each in how] == [("none", 4), ("fsdp", 1)]
    assert_same_run(tmp_path / "run", alone)


def lose_one(config: LMRunConfig, folder: Path, message: Path) -> None:
    """The second process is killed before a step; the first one writes its error to the file `message`."""
    if os.environ["RANK"] == "1":
        from rebased.train.lm import step

        step.LMStep.__call__ = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment, method-assign, return-value]
    try:
        train(config, folder)
    except OSError as error:
        message.write_text(str(error))
        raise SystemExit(3) from error


def test_a_process_that_is_killed_does_not_leave_the_other_waiting(text: Path, tmp_path: Path) -> None:
    config, message = config_of(text, "ddp"), tmp_path / "message"
    assert wait(start_world(2, lose_one, config, tmp_path / "run", message)) == [3, -signal.SIGKILL]
    assert "process 0 of 2 lost the connection to another one" in message.read_text()
    assert "start all of them again with --resume" in message.read_text()


def refuse(config: LMRunConfig, folder: Path) -> None:
    """An error that one process finds is raised in all of them, and reported by one."""
    with pytest.raises(ValueError, match="is not empty and not a run's") as caught:
        train(config, folder)
    assert isinstance(caught.value, ReportedElsewhere) == (os.environ["RANK"] == "1")


def test_a_mistake_ends_all_processes(text: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    assert wait(start_world(2, refuse, config_of(text, "ddp"), tmp_path)) == [0, 0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train": {"parallel": "none"}}, "torchrun started 2 processes and train.parallel is none; set it to ddp"),
        (
            {"train": {"batch_size": 3}},
            "train.batch_size 3 cannot be divided among 2 processes; choose a multiple of 2",
        ),
    ],
)
def test_what_cannot_be_shared(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match=message):
        train(config_of(text, "ddp", changes), tmp_path / "run")
