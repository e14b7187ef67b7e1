"""A run that is killed and resumed is the same run, bit for bit."""

import os
import random
import signal
import time
from pathlib import Path

import pytest

from rebased.runs.record import read_record
from rebased.runs.synthetic_config import SyntheticRunConfig
from rebased.train import train
from tiny_run import AtStep, everything, in_process, run, tiny

CONFIG = tiny({"train": {"checkpoint_seconds": 1e-9}})  # a checkpoint before every step


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run without an interruption."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert in_process(run, CONFIG, folder, False) == 0
    return folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a checkpoint per epoch."""
    folder = tmp_path_factory.mktemp("plain") / "run"
    train(tiny(), folder)
    return folder


def test_every_epoch_is_recorded_once(whole: Path) -> None:
    types = [line["type"] for line in read_record(whole)]
    assert types == ["run", "epoch", "epoch", "epoch", "end"]


def test_same_seed_same_run_other_seed_other_run(whole: Path, tmp_path: Path) -> None:
    train(CONFIG, tmp_path / "again")
    assert everything(tmp_path / "again") == everything(whole)
    train(tiny({"train": {"seed": 43}}), tmp_path / "other")
    assert everything(tmp_path / "other")[1] != everything(whole)[1]


def test_checkpoints_do_not_change_the_run(whole: Path, plain: Path) -> None:
    assert everything(plain)[1] == everything(whole)[1]


def run_timed(folder: Path, to: Path) -> None:
    started = time.process_time()
    train(CONFIG, folder)
    to.write_text(str(time.process_time() - started))


def run_until(folder: Path, resume: bool, seconds: float) -> None:
    """Let the system kill this process after so many seconds of CPU time, however busy the machine is."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    train(CONFIG, folder, resume=resume)


def test_killed_at_random_moments(whole: Path, tmp_path: Path) -> None:
    assert in_process(run_timed, tmp_path / "timed", tmp_path / "seconds") == 0
    duration = float((tmp_path / "seconds").read_text())
    moments = random.Random(0)
    codes = []
    for trial in range(4):
        folder, resume = tmp_path / str(trial), False
        for _ in range(3):
            codes.append(in_process(run_until, folder, resume, moments.uniform(0, duration)))
            resume = True
        assert in_process(run, CONFIG, folder, True) == 0
        assert everything(folder) == everything(whole)
        assert len(list(folder.glob("checkpoint-*.pt"))) == 1
        assert not list(folder.glob(".*.partial"))
    assert -signal.SIGPROF in codes


def die_at(config: SyntheticRunConfig, folder: Path, call: str, nth: int, after: bool) -> None:
    """Train; the process is killed just before or just after the nth call of an os function."""
    calls, original = 0, getattr(os, call)

    def fatal(*arguments: object) -> object:
        nonlocal calls
        calls += 1
        if calls == nth and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*arguments)
        if calls == nth:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(os, call, fatal)
    train(config, folder)


def test_killed_around_every_write(tmp_path: Path) -> None:
    """One epoch replaces 4 files (config, checkpoint, pointer, model; 2 syncs each) and adds 3 lines."""
    few = {0: {"examples": 8}, 1: {"examples": 8}}
    config = tiny({"train": {"epochs": 1}, "task": {"train": few, "test": few}})
    train(config, tmp_path / "whole")
    moments = [("fsync", nth, False) for nth in range(1, 12)]
    moments += [("replace", nth, after) for nth in range(1, 5) for after in (False, True)]
    for call, nth, after in moments:
        folder = tmp_path / f"{call}-{nth}-{after}"
        assert in_process(die_at, config, folder, call, nth, after) == -signal.SIGKILL, (call, nth, after)
        train(config, folder, resume=True)
        assert everything(folder) == everything(tmp_path / "whole"), (call, nth, after)
    assert in_process(die_at, config, tmp_path / "one more", "fsync", 12, False) == 0  # there is no twelfth call


def test_torn_last_line_and_lines_after_the_checkpoint(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    sink = AtStep(11, lambda: os.kill(os.getpid(), signal.SIGINT))
    assert train(CONFIG, folder, sinks=[sink]).status == "interrupted"
    record = folder / "record.jsonl"
    extra = read_record(whole)[2]
    with record.open("a") as file:
        file.write(f"{extra}".replace("'", '"') + '\n{"type": "epo')
    train(CONFIG, folder, resume=True)
    assert everything(folder) == everything(whole)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("step", [1, 8, 9, 24])
def test_signals_save_and_stop(plain: Path, tmp_path: Path, number: signal.Signals, step: int) -> None:
    """Checkpoints come after an epoch alone: at any other step there is one if the signal saves."""
    folder = tmp_path / "run"
    former = signal.getsignal(number)
    result = train(tiny(), folder, sinks=[AtStep(step, lambda: os.kill(os.getpid(), number))])
    assert signal.getsignal(number) is former
    if step == 24:  # the last step: nothing is left to interrupt
        assert result.status == "done"
    else:
        assert result.status == "interrupted"
        assert result.step == step
        assert (folder / f"checkpoint-{step}.pt").exists()
        train(tiny(), folder, resume=True)
    assert everything(folder) == everything(plain)


def test_the_second_ctrl_c_ends_at_once_and_loses_nothing(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"

    def twice() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(CONFIG, folder, sinks=[AtStep(10, twice)])
    train(CONFIG, folder, resume=True)
    assert everything(folder) == everything(whole)


def test_early_stop_survives_a_kill_before_the_end_is_written(tmp_path: Path) -> None:
    config = tiny({"train": {"stop_above": 0.0}})
    train(config, tmp_path / "whole")
    assert [line["type"] for line in read_record(tmp_path / "whole")] == ["run", "epoch", "end"]
    folder = tmp_path / "killed"
    assert in_process(die_at, config, folder, "replace", 4, False) == -signal.SIGKILL  # while the model is written
    train(config, folder, resume=True)
    assert everything(folder) == everything(tmp_path / "whole")


def test_resuming_with_other_code_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(CONFIG, tmp_path, sinks=[AtStep(9, lambda: os.kill(os.getpid(), signal.SIGINT))])
    monkeypatch.setattr(
        "rebased.train.lifecycle.describe_code", lambda: {"version": "9.9", "commit": None, "dirty": None}
    )
    train(CONFIG, tmp_path, resume=True)
    types = [line["type"] for line in read_record(tmp_path)]
    assert types == ["run", "epoch", "resume", "epoch", "epoch", "end"]


def test_done_run_is_left_as_it_is(whole: Path) -> None:
    before = {path.name: path.read_bytes() for path in whole.iterdir()}
    result = train(CONFIG, whole, resume=True)
    assert result.status == "already_done"
    assert result.accuracy == read_record(whole)[-1]["accuracy"]
    assert {path.name: path.read_bytes() for path in whole.iterdir()} == before
