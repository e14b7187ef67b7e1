"""rebased train, as it is typed."""

import fcntl
import os
import re
import shlex
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import pytest
import yaml

from command_line import rebased
from forked_python import COMMAND, Started
from rebased.cli import main
from rebased.cli.overrides import parse_overrides
from rebased.config import load_config
from rebased.files import NotSaved
from rebased.models.weights import load_model
from rebased.runs.folder import run_folder
from rebased.runs.record import read_record
from rebased.runs.synthetic_config import SyntheticRunConfig

TINY = {
    "task": {
        "vocab_size": 24,
        "train": [{"seq_len": 12, "kv_pairs": 2, "examples": 40}],
        "test": [{"seq_len": 12, "kv_pairs": 2, "examples": 20}],
    },
    "model": {"d_model": 8, "mixers": ["short_conv", {"name": "rebased", "n_heads": 2, "key_width": 4}]},
    "train": {"epochs": 2, "batch_size": 8, "lr": 0.01, "device": "cpu"},
}


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A config file in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("REBASED_TRACEBACK", raising=False)
    Path("tiny.yaml").write_text(yaml.safe_dump(TINY))
    return "tiny.yaml"


EPOCHS = 8


@contextmanager
def held(out: str, *words: str) -> Iterator[tuple[Started, TextIO]]:
    """A run of EPOCHS epochs that has trained one or more, and what it prints to: a pipe with room for its first lines
    alone, so that it is still there whenever the signal is sent, until somebody reads."""
    ours, theirs = os.pipe()
    size = fcntl.fcntl(theirs, fcntl.F_SETPIPE_SZ, 4096)
    os.write(theirs, b"\n" * (size - 400))
    words = ("train", "--config", "tiny.yaml", "--train.epochs", str(EPOCHS), "--train.stop_above", "1", *words)
    process = Started(COMMAND, *words, "--out", out, streams={1: theirs})
    os.close(theirs)
    while not (Path(out) / "record.jsonl").exists() or not epochs_of(out):
        assert process.poll() is None
        time.sleep(0.02)
    with os.fdopen(ours) as shown:
        yield process, shown


def test_help_names_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert rebased("train", "--help") == 0
    text = capsys.readouterr().out
    for word in ("--config", "--out", "--resume", "--import", "--train.lr 3e-3"):
        assert word in text


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--train.stop_above", "0"], "the test accuracy is above 0 (train.stop_above)"),
        (["--train.give_up", "{after_epoch: 1, below: 0.99}"], "no test accuracy reached 0.99 (train.give_up)"),
    ],
)
def test_a_run_that_ends_early_says_why(
    config: str, capsys: pytest.CaptureFixture[str], words: list[str], why: str
) -> None:
    assert rebased("train", "--config", config, *words) == 0
    *_, line, _ = capsys.readouterr().out.splitlines()
    assert line == f"ended after 1 of 2 epochs: {why}"


def test_a_run_from_start_to_end(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert rebased("train", "--config", config, "--train.lr", "3e-3", "--model.mixers.1.n_heads=4") == 0
    captured = capsys.readouterr()
    (folder,) = Path("runs").iterdir()
    record = read_record(folder)
    assert folder.name == f"tiny-{record[0]['digest']}"
    assert record[0]["config"]["train"]["lr"] == 3e-3
    assert record[0]["config"]["model"]["mixers"][1]["n_heads"] == 4
    lines = captured.out.splitlines()
    assert len(lines) == 1 + 2 + 1  # the start, two epochs, the result
    assert re.match(r"epoch 1/2  step 5  loss \d.*accuracy \d.*tokens/s", lines[1])
    assert lines[-1] == f"test accuracy {record[-1]['accuracy']:.4f} at epoch {record[-1]['epoch']}; {folder}"
    assert "\x1b" not in captured.out + captured.err  # this is not a terminal
    assert "\r" not in captured.out
    assert load_model(folder).config.d_model == 8

    assert rebased("train", "--config", config, "--train.lr", "3e-3", "--model.mixers.1.n_heads=4", "--resume") == 0
    assert capsys.readouterr().out.startswith("this run is done already: test accuracy")


def test_in_a_terminal_there_is_a_bar(
    config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("TERM", "xterm")
    assert rebased("train", "--config", config, "--out", "run") == 0
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", capsys.readouterr().out)
    assert re.search(r"━ *10/10 epoch 2/2  loss \d\.\d+  [\d,]+ tokens/s  accuracy 0\.\d+", shown)


BAD = [
    (["--config", "nowhere.yaml"], "nowhere.yaml: No such file or directory"),
    (
        ["--config", "tiny.yaml", "--train.lrr", "1"],
        "error: --train.lrr: unknown key 'lrr'; did you mean 'lr'?",
    ),
    (["--config", "tiny.yaml", "--train.learning_rate", "1"], "unknown key 'learning_rate'; did you mean 'lr'?"),
    (["--config", "tiny.yaml", "--train.lr"], "--train.lr needs a value"),
    (["--config", "tiny.yaml", "--lr", "1"], "unknown option '--lr'; did you mean '--train.lr'?"),
    (["--config", "tiny.yaml", "--seq_length", "1"], "unknown option '--seq_length'; settings of the config are"),
    (["--config", "tiny.yaml", "--resum"], "unknown option '--resum'; did you mean '--resume'?"),
    (["--config", "tiny.yaml", "faster"], "unexpected word 'faster'"),
    (["--config", "tiny.yaml", "--import", "mine.py"], "--import mine.py: there is no such file"),
    (["--config", "tiny.yaml", "--import", "no.such.module"], "--import no.such.module failed: ModuleNotFoundError"),
    (["--config", "tiny.yaml", "--out", "tiny.yaml"], "tiny.yaml is a file; choose a folder (--out)"),
    (["--config", "tiny.yaml", "--out", "."], ". is not empty and not a run's (no config.yaml)"),
    (
        ["--config", "lm/quick"],
        "data instead of task; train it with `rebased lm train`",
    ),
    ([], "--config"),
]


@pytest.mark.parametrize(("words", "message"), BAD)
def test_bad_input_is_one_line_and_exit_code_2(
    config: str, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert rebased("train", *words) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert message in captured.err
    assert len(captured.err.splitlines()) == 1
    assert captured.out == ""
    assert os.listdir() == ["tiny.yaml"]


def test_the_traceback_is_there_for_who_asks(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError):
        main(["train", "--config", "nowhere.yaml", "--debug"])
    monkeypatch.setenv("REBASED_TRACEBACK", "1")
    with pytest.raises(FileNotFoundError):
        main(["train", "--config", "nowhere.yaml"])


def test_our_own_bugs_are_called_so(
    config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("rebased.cli.train.run_training", lambda *_, **__: 1 / 0)
    assert rebased("train", "--config", config) == 1
    assert capsys.readouterr().err.startswith("error: ZeroDivisionError: division by zero (not your fault")


def test_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert rebased("trian") == 2
    assert capsys.readouterr().err == "error: unknown command 'trian'; did you mean 'train'?\n"


def test_a_mixer_of_ones_own(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.py").write_text(
        "from torch import nn\nfrom rebased.mixers import register_mixer\n\n"
        "@register_mixer('shifted')\nclass Previous(nn.Module):\n"
        "    def __init__(self, d_model: int, *, gain: float = 1.0) -> None:\n"
        "        super().__init__()\n        self.gain = gain\n"
        "    def forward(self, x):\n        return self.gain * nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]\n"
    )
    words = ["train", "--config", config, "--model.mixers", "[{name: shifted, gain: 2}]"]
    assert rebased(*words) == 2
    assert "unknown mixer 'shifted'" in capsys.readouterr().err
    assert rebased(*words, "--import", "mine.py", "--out", "run") == 0
    options = {"conv_width": 0, "output_gate": "none"}  # that every mixer can have
    assert read_record(Path("run"))[0]["config"]["model"]["mixers"] == [{"name": "shifted", "gain": 2.0} | options]
    Path("broken.py").write_text("import torch\nundefined_name\n")
    assert rebased(*words, "--import", "broken.py") == 2
    assert "--import broken.py failed: NameError: name 'undefined_name'" in capsys.readouterr().err


def test_settings_that_another_mixer_drops_are_noted(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        rebased("train", "--config", config, "--model.mixers.1.name", "attention", "--model.mixers.1.n_heads", "2") == 0
    )
    note = "note: model.mixers.1.name changes from 'rebased' to 'attention': the other settings there are dropped "
    assert capsys.readouterr().out.startswith(f"{note}(key_width 4); set again what should stay\n")


def test_errors_of_a_mixer_of_ones_own_are_not_called_ours(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.py").write_text(
        "from rebased.mixers import ShortConv, register_mixer\n\n"
        "@register_mixer('unbuilt')\nclass Unbuilt(ShortConv):\n"
        "    def __init__(self, d_model: int) -> None:\n        self.width = widths[d_model]\n\n"
        "@register_mixer('uncounted')\nclass Uncounted(ShortConv):\n"
        "    def state_size(self, seq_len):\n        return seq_len / 0\n"
    )
    words = ["train", "--config", config, "--import", "mine.py", "--out", "run", "--model.mixers"]
    failed = {"unbuilt": "in its constructor (line 6): NameError", "uncounted": "in state_size (line 11): ZeroDivision"}
    for name, where in failed.items():
        assert rebased(*words, f"[{name}]") == 2
        error = capsys.readouterr().err
        assert error.startswith(
            f"error: mixer '{name}' (class {name.title()} of {Path('mine.py').absolute()}) failed {where}"
        )
        assert "report" not in error
        assert not Path("run").exists()


def test_divergence_is_told_with_its_remedy(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert rebased("train", "--config", config, "--train.lr", "1e30", "--train.eps", "1e-30", "--out", "run") == 2
    error = capsys.readouterr().err
    assert re.search(
        r"error: .* at step \d+, where lr was 1e\+30; .*Try a lower rate, such as --train\.lr 3e\+29", error
    )
    assert read_record(Path("run"))[-1]["status"] == "diverged"


def test_ctrl_c_says_how_to_go_on(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    with held("a run") as (process, shown):
        process.send_signal(signal.SIGINT)
        out = shown.read()
    last = out.splitlines()[-1]
    _, err = process.communicate(timeout=300)
    assert process.returncode == 130
    assert err == ""
    assert "stopping: saving 1 run; Ctrl-C again ends at once" in out
    assert re.match(r"interrupted at step \d+, saved; continue with: rebased train --config", last)
    assert rebased(*shlex.split(last.partition("rebased ")[2])) == 0
    assert "from step 0" not in capsys.readouterr().out.splitlines()[0]
    assert epochs_of("a run") == list(range(1, EPOCHS + 1))


def test_a_folder_in_use_is_left_alone(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    with run_folder(Path("run"), load_config(SyntheticRunConfig, config), resume=False):
        assert rebased("train", "--config", config, "--out", "run", "--resume") == 2
    assert capsys.readouterr().err.startswith("error: run is in use by another process; wait until it ends")


def test_nothing_to_resume_is_said(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert rebased("train", "--config", config, "--out", "new", "--resume") == 0
    assert "there is no run in new to resume: this begins a new one" in capsys.readouterr().out
    assert rebased("train", "--config", config, "--out", "new", "--resume") == 0
    assert "this begins a new one" not in capsys.readouterr().out


def test_kill_9_and_resume_is_the_run_that_was_never_killed(config: str) -> None:
    often = ["--train.checkpoint_seconds", "1e-9"]
    words = ["train", "--config", config, "--train.epochs", str(EPOCHS), "--train.stop_above", "1", *often]
    assert rebased(*words, "--out", "whole") == 0
    with held("killed", *often) as (killed, _):
        killed.kill()
        killed.communicate(timeout=300)
    assert killed.returncode == -signal.SIGKILL
    assert rebased(*words, "--out", "killed", "--resume") == 0
    assert Path("killed/model.safetensors").read_bytes() == Path("whole/model.safetensors").read_bytes()
    assert epochs_of("killed") == list(range(1, EPOCHS + 1))
    assert losses_of("killed") == losses_of("whole")


def epochs_of(folder: str) -> list[int]:
    return [line["epoch"] for line in read_record(folder) if line["type"] == "epoch"]


def losses_of(folder: str) -> list[float]:
    return [line["loss"] for line in read_record(folder) if line["type"] == "epoch"]


def test_parse_overrides() -> None:
    words = ["--train.lr", "-1", "--model.d-model=64", "--task.train=[{a: 1}]", "--train.lr", "3e-3"]
    assert parse_overrides(words, []) == {"train.lr": "3e-3", "model.d_model": "64", "task.train": "[{a: 1}]"}


def test_what_could_not_be_saved_is_told_with_the_command_that_resumes(
    config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object, **__: object) -> None:
        raise NotSaved("checkpoint-8.pt could not be saved: the disk is full; make room, then resume the run")

    monkeypatch.setattr("rebased.cli.train.run_training", full)
    assert rebased("train", "--config", config, "--out", "run") == 2
    message = capsys.readouterr().err
    assert message.count("--resume") == 1
    assert message.endswith("continue with: rebased train --config run/config.yaml --out run --resume\n")
