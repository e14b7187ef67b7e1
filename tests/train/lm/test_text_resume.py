"""A language model's run that is killed and resumed is the same run, bit for bit; damage is an error."""

import errno
import hashlib
import json
import os
import pickle
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from rebased.config import merge
from rebased.files import describe_file
from rebased.models import LanguageModel, preset
from rebased.runs.lm_config import LMRunConfig
from rebased.runs.record import read_record
from rebased.train import Sink, checkpoint, train
from rebased.train.lm.checkpoint import SafeReader, _tensors
from rebased.train.optimiser import make_moments
from tiny_lm_run import everything, losses, start, tiny, wait, write_text
from tiny_run import AtStep

OFTEN = {"train": {"checkpoint_every": 3}, "model": {"embed_dropout": 0.1}}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("data") / "text")


@pytest.fixture(scope="module")
def whole(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run without an interruption."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    train(tiny(text, OFTEN), folder)
    return folder


@pytest.fixture(scope="module")
def at_seven(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return interrupted(tiny(text, OFTEN), tmp_path_factory.mktemp("interrupted") / "run", 7)


def interrupted(config: LMRunConfig, folder: Path, step: int) -> Path:
    stop = AtStep(step, lambda: os.kill(os.getpid(), signal.SIGINT))
    assert train(config, folder, sinks=[stop]).status == "interrupted"
    return folder


def test_the_record_has_every_line_once(whole: Path) -> None:
    lines = [(line["type"], line.get("step")) for line in read_record(whole)]
    expected = [("run", None), ("step", 3), ("step", 6), ("eval", 6), ("step", 9), ("step", 12), ("eval", 12)]
    assert lines == [*expected, ("end", 12)]


class WhileMeasuring(Sink):
    """Sends SIGINT once, when the first windows are measured, and counts `stopping`."""

    def __init__(self) -> None:
        self.asked, self.stops = False, 0

    def measuring(self, split: str, done: int, total: int) -> None:
        if done and not self.asked:
            self.asked = True
            os.kill(os.getpid(), signal.SIGINT)

    def stopping(self) -> None:
        self.stops += 1


def test_measuring_in_the_end_can_be_interrupted(text: Path, whole: Path, tmp_path: Path) -> None:
    sink = WhileMeasuring()
    result = train(tiny(text, OFTEN), tmp_path / "run", sinks=[sink])
    assert (result.status, result.step, sink.stops) == ("interrupted", 12, 1)
    assert not any(line["type"] == "end" for line in read_record(tmp_path / "run"))
    result = train(tiny(text, OFTEN), tmp_path / "run", resume=True)
    assert result.status == "done"
    assert result.perplexity == read_record(whole)[-1]["valid"]["all"]["perplexity"]
    assert everything(tmp_path / "run") == everything(whole)


def test_how_often_is_saved_changes_nothing_but_the_seed_does(text: Path, whole: Path, tmp_path: Path) -> None:
    no_onednn = AtStep(12, partial(torch.backends.mkldnn.set_flags, False))  # as torch on a CPU without bf16
    train(tiny(text, {"model": {"embed_dropout": 0.1}}), tmp_path / "run", sinks=[no_onednn])
    assert torch.backends.mkldnn.enabled  # later runs depend on it
    assert everything(tmp_path / "run")[1] == everything(whole)[1]
    train(tiny(text, OFTEN | {"train": {"seed": 43}}), tmp_path / "other")
    assert everything(tmp_path / "other")[1] != everything(whole)[1]


def die(config: LMRunConfig, folder: Path, moment: str, step: int) -> None:
    """Train until this step (or its checkpoint); the process is killed there."""
    end = partial(os.kill, os.getpid(), signal.SIGKILL)
    name = f"checkpoint-{step}"
    finish, delete = dcp.FileSystemWriter.finish, checkpoint.delete_others

    def die_before_contents(self: dcp.FileSystemWriter, metadata: Any, results: Any) -> None:
        end() if name in str(self.path) else finish(self, metadata, results)

    def die_after_pointer(folder: Path, keep: str) -> None:
        end() if keep == name else delete(folder, keep)

    sinks = [AtStep(step, end)] if moment == "step" else []
    if moment == "written":
        dcp.FileSystemWriter.finish = die_before_contents  # type: ignore[method-assign]
    if moment == "pointed":
        checkpoint.delete_others = die_after_pointer
    train(config, folder, resume=True, sinks=sinks)


def test_killed_again_and_again(text: Path, whole: Path, tmp_path: Path) -> None:
    """Killed before the first checkpoint, while one is written, between two, when the pointer changes, at the end."""
    config, folder = tiny(text, OFTEN), tmp_path / "run"
    moments = [("step", 2), ("written", 3), ("written", 6), ("step", 8), ("pointed", 9), ("step", 12), ("pointed", 12)]
    for moment, step in moments:
        assert wait([start(die, config, folder, moment, step)]) == [-signal.SIGKILL], (moment, step)
    assert len(list(folder.glob("checkpoint-*"))) > 1  # killed before the older ones were removed
    train(config, folder, resume=True)
    assert everything(folder) == everything(whole)
    assert [path.name for path in folder.glob("checkpoint-*")] == ["checkpoint-12"]


@pytest.mark.parametrize("step", [1, 6, 11])  # between two lines of the record, and at one
def test_signals_save_and_stop(text: Path, whole: Path, tmp_path: Path, step: int) -> None:
    config = tiny(text, OFTEN | {"train": {"checkpoint_every": 100}})
    folder = interrupted(config, tmp_path / "run", step)
    assert [path.name for path in folder.glob("checkpoint-*")] == [f"checkpoint-{step}"]
    assert train(config, folder, resume=True).status == "done"
    assert everything(folder)[1] == everything(whole)[1]
    assert losses(folder) == losses(whole)


def test_how_it_is_computed_may_change_and_what_may_not(text: Path, whole: Path, tmp_path: Path) -> None:
    folder = interrupted(tiny(text, OFTEN), tmp_path / "run", 5)
    changed = tiny(text, merge(OFTEN, {"train": {"recompute": True, "parallel": "fsdp"}}))
    assert changed.digest() == tiny(text, OFTEN).digest()
    other = tiny(text, merge(OFTEN, {"train": {"precision": "bf16"}}))
    assert other.digest() != changed.digest()
    with pytest.raises(ValueError, match=r"holds another run: train\.precision is 'auto' there and 'bf16' here"):
        train(other, folder, resume=True)
    train(changed, folder, resume=True)
    assert everything(folder)[1] == everything(whole)[1]


def test_a_done_run_is_left_as_it_is(text: Path, whole: Path) -> None:
    before = {path.name: path.read_bytes() for path in whole.iterdir() if path.is_file()}
    assert train(tiny(text, OFTEN), whole, resume=True).status == "already_done"
    assert {path.name: path.read_bytes() for path in whole.iterdir() if path.is_file()} == before


def damage(file: str) -> Callable[[Path], None]:
    def act(folder: Path) -> None:
        path = next(folder.glob(file))
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)

    return act


def remove(file: str) -> Callable[[Path], None]:
    return lambda folder: next(folder.glob(file)).unlink()


DAMAGE = {
    "weights": (damage("checkpoint-*/__0_0.distcp"), "__0_0.distcp is damaged: its checksum"),
    "contents": (damage("checkpoint-*/.metadata"), ".metadata is damaged: its checksum"),
    "missing": (remove("checkpoint-*/__0_0.distcp"), "__0_0.distcp is missing, though checkpoint.json names it"),
    "pointer": (damage("checkpoint.json"), "checkpoint.json is damaged"),
    "lost": (remove("checkpoint.json"), "has lost its checkpoint.json"),
    "record": (lambda folder: os.truncate(folder / "record.jsonl", 100), "record.jsonl is damaged"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_an_error(text: Path, at_seven: Path, tmp_path: Path, name: str) -> None:
    config = tiny(text, OFTEN)
    act, message = DAMAGE[name]
    folder = Path(shutil.copytree(at_seven, tmp_path / "run"))
    act(folder)
    with pytest.raises(ValueError, match=message):
        train(config, folder, resume=True)


def test_another_architecture_is_an_error(
    text: Path, at_seven: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny(text, OFTEN)
    folder = Path(shutil.copytree(at_seven, tmp_path / "run"))
    monkeypatch.setattr(
        "rebased.train.lm.workload.LanguageModel",
        lambda shape: LanguageModel(shape.model_copy(update={"mlp_ratio": 3})),
    )
    with pytest.raises(ValueError, match=r"another architecture.*fc1.bias is \[16\] float32 there and \[24\] float32"):
        train(config, folder, resume=True)


def test_another_text_is_an_error(text: Path, tmp_path: Path) -> None:
    shutil.copytree(text, tmp_path / "text")
    config = tiny(tmp_path / "text", OFTEN)
    folder = interrupted(config, tmp_path / "run", 7)
    shutil.rmtree(tmp_path / "text")
    write_text(tmp_path / "text", seed=1)
    with pytest.raises(ValueError, match="holds another text than this run began with"):
        train(config, folder, resume=True)


CONTENTS = "torch.distributed.checkpoint.filesystem"


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("posix", "system"),
        (CONTENTS, "os.system"),
        (CONTENTS, "io.FileIO"),
        (CONTENTS, "FileSystem"),
        ("torch", "load"),
    ],
)
def test_a_table_of_contents_cannot_run_code(tmp_path: Path, module: str, name: str) -> None:
    """The pickle names a function and calls it with a path; a dotted name would reach what a module imports."""
    words = [b"\x8c" + bytes([len(word)]) + word.encode() for word in (module, name, str(tmp_path / "made"))]
    call = words[0] + words[1] + b"\x93" + words[2] + b"\x85R."  # both names, their object; path, tuple, call, end
    (tmp_path / ".metadata").write_bytes(b"\x80\x04" + call)
    with pytest.raises(pickle.UnpicklingError, match="is not allowed in a checkpoint"):
        SafeReader(tmp_path).read_metadata()


def forge(folder: Path, change: Callable[[Any], None], files: bool = False) -> None:
    """Change the table of contents of the checkpoint in `folder`, and write a pointer with matching checksums.

    With `files` it is the file of tensors that `change` gets, not the table of contents.
    """
    pointer = json.loads((folder / "checkpoint.json").read_text())
    step = folder / pointer["name"]
    if files:
        change(step / "__0_0.distcp")
    else:
        metadata = SafeReader(step).read_metadata()
        change(metadata)
        (step / ".metadata").write_bytes(pickle.dumps(metadata))
    pointer["files"] = {name: describe_file(folder / name) for name in pointer["files"]}
    del pointer["sha256"]
    checksum = hashlib.sha256(json.dumps(pointer, sort_keys=True).encode()).hexdigest()
    (folder / "checkpoint.json").write_text(json.dumps({**pointer, "sha256": checksum}))


def rename(name: str) -> Callable[[Any], None]:
    def act(metadata: Any) -> None:
        infos = metadata.storage_data
        metadata.storage_data = {index: replace(info, relative_path=name) for index, info in infos.items()}

    return act


def cast(metadata: Any) -> None:
    about = next(iter(metadata.state_dict_metadata.values()))
    about.properties.dtype = torch.int8


def drop_a_chunk(metadata: Any) -> None:
    next(iter(metadata.state_dict_metadata.values())).chunks.clear()


FORGED = {
    "outside": (rename("../../outside.bin"), r"it names '\.\./\.\./outside\.bin', which is outside of the checkpoint"),
    "absolute": (rename("/etc/hostname"), "it names '/etc/hostname', which is outside of the checkpoint"),
    "unknown": (rename("__1_0.distcp"), r"it names '__1_0\.distcp', of which checkpoint\.json has no checksum"),
    "dtype": (cast, r"is of another architecture.*int8 there and .* float32 here"),
    "chunks": (drop_a_chunk, r"is of another architecture.* is None there and "),
    "nothing": (lambda metadata: vars(metadata).update(storage_data=None), "cannot be read safely"),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_table_of_contents_that_lies_is_refused(text: Path, at_seven: Path, tmp_path: Path, name: str) -> None:
    change, message = FORGED[name]
    folder = Path(shutil.copytree(at_seven, tmp_path / "run"))
    shutil.copy(next(folder.glob("checkpoint-*/__0_0.distcp")), tmp_path / "outside.bin")
    forge(folder, change)
    with pytest.raises(ValueError, match=message):
        train(tiny(text, OFTEN), folder, resume=True)


@pytest.mark.parametrize("content", [b"\0", b"garbage "])
def test_tensors_that_are_garbage_are_one_line(text: Path, at_seven: Path, tmp_path: Path, content: bytes) -> None:
    """The checksum is that of the garbage, so the file is read. torch's error has 61 lines."""
    folder = Path(shutil.copytree(at_seven, tmp_path / "run"))
    forge(folder, lambda path: path.write_bytes(content * (path.stat().st_size // len(content))), files=True)
    with pytest.raises(ValueError, match=r"holds tensors that cannot be read: .*restore it") as caught:
        train(tiny(text, OFTEN), folder, resume=True)
    assert len(str(caught.value).splitlines()) == 1


def test_a_full_disk_is_an_error_and_the_last_checkpoint_stays(
    text: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, write = tiny(text, OFTEN), dcp.FileSystemWriter.write_data

    def full(self: dcp.FileSystemWriter, *arguments: object) -> object:
        if "checkpoint-6" in str(self.path):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(dcp.FileSystemWriter, "write_data", full)
    with pytest.raises(OSError, match="checkpoint-6 could not be saved: No space left on device; the one of step 3 is"):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run" / "checkpoint-6").exists()
    monkeypatch.undo()
    train(config, tmp_path / "run", resume=True)
    assert everything(tmp_path / "run") == everything(whole)


def test_divergence_is_an_error_and_its_weights_are_not_saved(text: Path, tmp_path: Path) -> None:
    config = tiny(text, {"train": {"lr": 1e30, "eps": 1e-30, "clip_norm": None, "weight_decay": 0}})
    with pytest.raises(ValueError, match=r"at step \d+, where lr was .* Try a lower rate, such as --train.lr 3e\+29"):
        train(config, tmp_path / "run")
    assert read_record(tmp_path / "run")[-1]["status"] == "diverged"
    assert not (tmp_path / "run" / "checkpoint.json").exists()
    with pytest.raises(ValueError, match="holds a run that went no further"):
        train(config, tmp_path / "run", resume=True)


def test_a_checkpoint_walks_through_the_model_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once per tensor took minutes at a thousand layers."""
    model = LanguageModel(preset("rebased", d_model=24, vocab_size=8))
    optimiser = torch.optim.AdamW(model.parameters())
    make_moments(optimiser)
    walks, original = [], model.state_dict
    monkeypatch.setattr(model, "state_dict", lambda *args, **named: walks.append(1) or original(*args, **named))
    found = _tensors(model, optimiser)
    assert len(walks) == 1
    assert {f"model.{name}" for name in original()} == {name for name in found if name.startswith("model.")}
