"""Damaged, foreign and half-written checkpoints; a full disk."""

import errno
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from rebased.files import NotSaved
from rebased.train import Diverged, train
from rebased.train.checkpoint import read_pointer, read_state, save_checkpoint
from rebased.train.world import World
from tiny_run import AtStep, everything, tiny

CONFIG = tiny()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run without an interruption."""
    train(CONFIG, folder := tmp_path_factory.mktemp("whole") / "run")
    return folder


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("interrupted") / "run"
    train(CONFIG, folder, sinks=[AtStep(10, lambda: os.kill(os.getpid(), signal.SIGINT))])
    return folder


@pytest.fixture
def folder(interrupted: Path, tmp_path: Path) -> Path:
    """A run that was interrupted after step 10."""
    return Path(shutil.copytree(interrupted, tmp_path / "run"))


def forge(folder: Path, state: Any, **changes: Any) -> None:
    """Replace the checkpoint by another one, with a matching pointer."""
    former = read_pointer(folder)
    assert former is not None
    about = {"digest": CONFIG.digest(), "progress": former.progress | {"step": 99}, "record": former.record} | changes
    save_checkpoint(folder, state, World(0, 1, torch.device("cpu")), **about)


def resume_fails(folder: Path, match: str) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(ValueError, match=match):
        train(CONFIG, folder, resume=True)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_the_pointer_describes_the_file(folder: Path) -> None:
    pointer = json.loads((folder / "checkpoint.json").read_text())
    assert pointer.keys() == {"format", "step", "digest", "name", "file", "progress", "record", "sha256"}
    assert (pointer["name"], pointer["step"], pointer["progress"]["epoch"]) == ("checkpoint-10.pt", 10, 1)
    assert pointer["file"]["bytes"] == (folder / "checkpoint-10.pt").stat().st_size
    assert pointer["digest"] == CONFIG.digest()
    torch.load(folder / "checkpoint-10.pt", weights_only=True)


def test_flipped_bit(folder: Path) -> None:
    data = bytearray((folder / "checkpoint-10.pt").read_bytes())
    data[len(data) // 2] ^= 1
    (folder / "checkpoint-10.pt").write_bytes(data)
    resume_fails(folder, r"checkpoint-10\.pt is damaged: its checksum.*another folder")


def test_truncated(folder: Path) -> None:
    os.truncate(folder / "checkpoint-10.pt", 1000)
    resume_fails(folder, r"checkpoint-10\.pt is damaged: its checksum")


def test_missing(folder: Path) -> None:
    (folder / "checkpoint-10.pt").unlink()
    resume_fails(folder, r"checkpoint-10\.pt is missing, though checkpoint\.json names it")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"file": "x"}', '{"file": "../x"}', "\x00\xff"])
def test_damaged_pointer(folder: Path, text: str) -> None:
    (folder / "checkpoint.json").write_text(text)
    resume_fails(folder, r"checkpoint\.json is damaged")


@pytest.mark.parametrize("change", [{"step": 9}, {"progress": {}}, {"files": {}}, {"record": {"bytes": 0}}])
def test_changed_pointer(folder: Path, change: dict[str, Any]) -> None:
    """All fields of the pointer are checked, not only the files that it names."""
    pointer = json.loads((folder / "checkpoint.json").read_text())
    (folder / "checkpoint.json").write_text(json.dumps(pointer | change))
    resume_fails(folder, r"checkpoint\.json is damaged.*checksum")


def test_changed_record(folder: Path) -> None:
    """A digit is changed in a line that was written before the checkpoint."""
    data = (folder / "record.jsonl").read_bytes()
    assert b'"loss": ' in data
    at = data.index(b'"loss": ') + len(b'"loss": ')
    digit = b"7" if data[at : at + 1] != b"7" else b"8"
    (folder / "record.jsonl").write_bytes(data[:at] + digit + data[at + 1 :])
    resume_fails(folder, r"record\.jsonl is damaged: its first \d+ bytes")


def test_of_another_run(folder: Path) -> None:
    forge(folder, {}, digest="0123456789ab")
    resume_fails(folder, r"checkpoint-99\.pt belongs to another run, 0123456789ab")


def test_of_another_format(folder: Path) -> None:
    forge(folder, {"format": 99})
    resume_fails(folder, r"checkpoint-99\.pt is not a checkpoint of format 3")


def test_of_another_architecture(folder: Path) -> None:
    state = read_state(folder / "checkpoint-10.pt")
    state["tensors"]["model.norm.weight"] = torch.ones(9)
    forge(folder, state)
    resume_fails(folder, r"checkpoint-99\.pt is of another architecture.*norm\.weight.*resume with the code")


def test_of_another_dtype(folder: Path) -> None:
    state = read_state(folder / "checkpoint-10.pt")
    state["tensors"]["model.norm.weight"] = state["tensors"]["model.norm.weight"].to(torch.int8)
    forge(folder, state)
    resume_fails(folder, r"checkpoint-99\.pt is of another architecture.*norm\.weight is \[\d+\] int8 there")


def test_code_in_a_checkpoint_is_not_run(folder: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(folder / "pwned"),)

    forge(folder, {"tensors": Evil()})
    resume_fails(folder, r"checkpoint-99\.pt is not a checkpoint that torch can read safely")
    assert not (folder / "pwned").exists()


def test_lost_pointer_is_not_a_reason_to_start_over(tmp_path: Path) -> None:
    sink = AtStep(20, lambda: os.kill(os.getpid(), signal.SIGINT))
    train(CONFIG, tmp_path / "run", sinks=[sink])
    (tmp_path / "run" / "checkpoint.json").unlink()
    resume_fails(tmp_path / "run", r"has lost its checkpoint\.json")


def test_record_shorter_than_its_checkpoint(folder: Path) -> None:
    (folder / "record.jsonl").write_text("")
    resume_fails(folder, r"record\.jsonl is damaged: its first \d+ bytes")


def test_damaged_record_line(folder: Path) -> None:
    lines = (folder / "record.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "record.jsonl").write_bytes(lines[0] + b"garbage\n" + lines[1])
    resume_fails(folder, r"record\.jsonl is damaged in line 2")


@pytest.mark.parametrize("nth", range(1, 9))
def test_full_disk(folder: Path, whole: Path, monkeypatch: pytest.MonkeyPatch, nth: int) -> None:
    """Whichever write fails: the error names the full disk, the last checkpoint stays, and the run can be resumed."""
    former, real, calls = read_pointer(folder), os.fsync, 0

    def full(handle: int) -> None:
        nonlocal calls
        calls += 1
        if calls == nth:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(handle)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(NotSaved, match=r"could not be (saved|written): No space left.*make room, then resume the run"):
        train(CONFIG, folder, resume=True)
    monkeypatch.setattr(os, "fsync", real)
    assert not list(folder.glob(".*.partial"))
    pointer = read_pointer(folder)
    assert pointer is not None
    assert former is not None
    assert pointer.step >= former.step
    assert [path.name for path in folder.glob("checkpoint-*.pt")] == [pointer.name]
    train(CONFIG, folder, resume=True)
    assert everything(folder) == everything(whole)


def test_full_disk_within_the_write(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full while torch.save writes the file."""
    before = (folder / "checkpoint.json").read_bytes()
    monkeypatch.setattr(torch, "save", lambda state, file: open("/dev/full", "wb", buffering=0).write(b"x"))  # noqa: SIM115
    with pytest.raises(
        OSError, match=r"checkpoint-16\.pt could not be saved: No space left.*the one of step 10 is whole"
    ):
        train(CONFIG, folder, resume=True)
    assert (folder / "checkpoint.json").read_bytes() == before
    assert {path.name for path in folder.glob("*checkpoint-*")} == {"checkpoint-10.pt"}


def test_diverged_is_a_value_error() -> None:
    assert issubclass(Diverged, ValueError)  # the remedy is a value in the config
