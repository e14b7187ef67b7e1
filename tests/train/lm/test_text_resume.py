"""A language model's run that is killed and resumed is the same run, bit for bit; damage is an error."""

import errno
import os
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from rebased.config import merge
from rebased.models import LanguageModel, preset
from rebased.runs.lm_config import LMRunConfig
from rebased.runs.record import read_record
from rebased.train import Sink, checkpoint, train
from rebased.train.checkpoint import _tensors
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
    name = f"checkpoint-{step}.pt"
    save, delete = torch.save, checkpoint.delete_others

    def die_after_file(state: Any, file: Any) -> None:
        save(state, file)
        if name in str(file.name):
            end()

    def die_after_pointer(folder: Path, keep: str) -> None:
        end() if keep == name else delete(folder, keep)

    sinks = [AtStep(step, end)] if moment == "step" else []
    if moment == "written":
        torch.save = die_after_file
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
    assert [path.name for path in folder.glob("checkpoint-*")] == ["checkpoint-12.pt"]


@pytest.mark.parametrize("step", [1, 6, 11])  # between two lines of the record, and at one
def test_signals_save_and_stop(text: Path, whole: Path, tmp_path: Path, step: int) -> None:
    config = tiny(text, OFTEN | {"train": {"checkpoint_every": 100}})
    folder = interrupted(config, tmp_path / "run", step)
    assert [path.name for path in folder.glob("checkpoint-*")] == [f"checkpoint-{step}.pt"]
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
    "weights": (damage("checkpoint-*.pt"), "checkpoint-7.pt is damaged: its checksum"),
    "missing": (remove("checkpoint-*.pt"), "checkpoint-7.pt is missing, though checkpoint.json names it"),
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


def test_a_full_disk_is_an_error_and_the_last_checkpoint_stays(
    text: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, save = tiny(text, OFTEN), torch.save

    def full(state: Any, file: Any) -> None:
        if "checkpoint-6" in str(file.name):
            raise OSError(errno.ENOSPC, "No space left on device")
        save(state, file)

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(
        OSError, match=r"checkpoint-6\.pt could not be saved: No space left on device; the one of step 3"
    ):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run" / "checkpoint-6.pt").exists()
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


def test_a_checkpoint_visits_the_modules_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once per tensor took minutes at a thousand layers."""
    model = LanguageModel(preset("rebased", d_model=24, vocab_size=8))
    optimiser = torch.optim.AdamW(model.parameters())
    make_moments(optimiser)
    visits, original = [], model.state_dict
    monkeypatch.setattr(model, "state_dict", lambda *args, **named: visits.append(1) or original(*args, **named))
    found = _tensors(model, optimiser)
    assert len(visits) == 1
    assert {f"model.{name}" for name in original()} == {name for name in found if name.startswith("model.")}
