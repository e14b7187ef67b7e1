"""rebased lm train, as it is typed."""

import json
import os
import re
import shlex
import signal
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from command_line import rebased
from forked_python import COMMAND, Started
from rebased.config import load_config
from rebased.data import write_corpus
from rebased.models.weights import load_model
from rebased.paper.counts import count_parameters
from rebased.runs.lm_config import LMRunConfig
from rebased.runs.record import read_record
from rebased.runs.shipped import CONFIGS
from rebased.train.sweep.grid import load_sweep

lm_train = partial(rebased, "lm", "train")

TINY: dict[str, Any] = {
    "data": {"folder": "text", "seq_len": 16},
    "model": {"vocab_size": 257, "d_model": 8, "mixers": ["short_conv", {"name": "rebased", "n_heads": 2}]},
    "train": {"steps": 4, "warmup_steps": 1, "batch_size": 2, "log_every": 2, "eval_every": 2, "device": "cpu"},
}


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A config file and its text in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("REBASED_TRACEBACK", raising=False)
    Path("tiny.yaml").write_text(yaml.safe_dump(TINY))
    write_corpus(Path("text"), {"train": ["abc " * 60], "valid": ["abc " * 10]})
    return "tiny.yaml"


def test_a_run_from_start_to_end(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert lm_train("--config", config, "--train.lr", "3e-3", "--model.n_layers=3") == 0
    captured = capsys.readouterr()
    (folder,) = Path("runs").iterdir()
    record = read_record(folder)
    assert folder.name == f"tiny-{record[0]['digest']}"
    assert record[0]["config"]["train"]["lr"] == 3e-3
    lines = captured.out.splitlines()
    assert re.match(r"[\d,]+ parameters on cpu, 4 steps of 2 x 16 tokens, from step 0", lines[0])
    assert re.match(r"step 2/4  loss \d.*\|g\| \d.*lr 3.00e-03  [\d,]+ tokens/s  \d+ s left", lines[1])
    assert re.match(r"step 2/4  valid loss \d\.\d+  perplexity \d+\.\d+  \(40 tokens", lines[2])
    assert lines[-2] == "measuring 3 windows of valid"
    every, ar, non_ar = (record[-1]["valid"][part]["perplexity"] for part in ("all", "ar", "non_ar"))
    parts = f"{every:.3f} (AR {ar:.3f}, non-AR {non_ar:.3f})"  # as measured in the end, not on the way
    assert lines[-1] == f"valid perplexity {parts} after 4 steps; {folder}"
    assert captured.err == ""
    assert load_model(folder).config.n_layers == 3
    assert lm_train("--config", config, "--train.lr", "3e-3", "--model.n_layers=3", "--resume") == 0
    assert capsys.readouterr().out.startswith("this run is done already: valid perplexity")


def test_a_text_in_which_nothing_repeats_has_no_ar_perplexity(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--config", config, "--data.seq_len", "4", "--train.final_windows", "1", "--out", "run"]
    assert lm_train(*words) == 0
    found = read_record(Path("run"))[-1]["valid"]
    assert (found["ar_share"], found["ar"]) == (0, {"loss": None, "perplexity": None})
    assert found["by_distance"] == []
    every = f"{found['all']['perplexity']:.3f}"
    assert f"valid perplexity {every} (AR -, non-AR {every}) after 4 steps; run" in capsys.readouterr().out


def test_in_a_terminal_there_is_a_bar(
    config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("FORCE_COLOR", "1"), ("COLUMNS", "160"), ("TERM", "xterm")):
        monkeypatch.setenv(name, value)
    assert lm_train("--config", config, "--out", "run") == 0
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", capsys.readouterr().out)
    assert re.search(r"━ *4/4 loss \d\.\d+  \|g\| \d+\.\d+  [\d,]+ tokens/s  valid ppl \d+\.\d+", shown)
    assert re.search(r"━ *3/3 windows of valid measured", shown)


BAD = [
    (["--config", "nowhere.yaml"], "nowhere.yaml: No such file or directory"),
    (
        ["--config", "tiny.yaml", "--train.stepz", "1"],
        "--train.stepz: unknown key 'stepz'; did you mean 'steps'?",
    ),
    (["--config", "tiny.yaml", "--steps", "1"], "unknown option '--steps'; did you mean '--train.steps'?"),
    (
        ["--config", "tiny.yaml", "--data.folder", "data/stdlib"],
        "data.folder data/stdlib does not exist; make it with: rebased data prepare -o data/stdlib",
    ),
    (
        ["--config", "tiny.yaml", "--model.vocab_size", "256"],
        "which has 257 tokens, but model.vocab_size is",
    ),
    (["--config", "tiny.yaml", "--model.max_len", "8"], "data.seq_len 16 is more than the model's 8 learned positions"),
    (
        ["--config", "tiny.yaml", "--data.seq_len", "9999"],
        "tokens to train on, less than one window; choose a shorter data.seq_len",
    ),
    (
        ["--config", "tiny.yaml", "--train.warmup_steps", "5"],
        "warmup_steps 5 is more than the run's steps, 4; choose fewer",
    ),
    (["--config", "mqar/quick"], "task instead of data; train it with `rebased train`"),
    (["--config", "tiny.yaml", "--out", "tiny.yaml"], "tiny.yaml is a file; choose a folder (--out)"),
    (["--config", "tiny.yaml", "--train.lr", "1e30", "--train.eps", "1e-30", "--out", "run"], "Try a lower rate"),
]


@pytest.mark.parametrize(("words", "message"), BAD)
def test_bad_input_is_one_line_and_exit_code_2(
    config: str, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert lm_train(*words) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert message in captured.err
    assert len(captured.err.splitlines()) == 1


def test_a_damaged_text_is_told_before_anything_begins(
    config: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = Path("text/valid-00000.bin")
    content = bytearray(shard.read_bytes())
    content[4] ^= 1
    shard.write_bytes(content)
    assert lm_train("--config", config, "--out", "run") == 2
    assert "valid-00000.bin is damaged: its sha256" in capsys.readouterr().err
    assert not Path("run").exists()
    monkeypatch.setattr("rebased.data.corpus.SMALL_BYTES", 100)  # to read the Pile once takes longer than one may wait
    assert lm_train("--config", config, "--out", "run") == 0


def test_ctrl_c_says_how_to_go_on(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--config", config, "--train.steps", "2000", "--train.final_windows", "1", "--out", "a run"]
    process = Started(COMMAND, "lm", "train", *words)
    assert process.stdout is not None
    while not process.stdout.readline().startswith("step 2/"):
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (130, "")
    last = out.splitlines()[-1]
    assert "stopping: saving 1 run; Ctrl-C again ends at once" in out
    assert re.match(r"interrupted at step \d+, saved; continue with: rebased lm train --config", last)
    again = shlex.split(last.partition("rebased lm train ")[2])
    step = int(re.findall(r"step (\d+)", last)[0])
    assert json.loads(Path("a run/checkpoint.json").read_text())["progress"]["step"] == step
    assert lm_train(*[word for word in again if word != "--resume"]) == 2
    assert "add --resume to go on" in capsys.readouterr().err


def test_dashboards_get_the_lines_of_the_record(
    config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stand-ins that take what the packages take: whether these are installed is the user's affair."""
    heard: list[tuple[Any, ...]] = []

    class Writer:
        def __init__(self, folder: str, purge_step: int) -> None:
            heard.append((Path(folder).name, purge_step))

        def add_scalar(self, name: str, value: float, step: int) -> None:
            heard.append((name, value, step))

        def flush(self) -> None: ...

        def close(self) -> None:
            heard.append(("closed",))

    board = ModuleType("torch.utils.tensorboard")
    board.SummaryWriter = Writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)
    assert lm_train("--config", config, "--out", "run", "--tensorboard") == 0
    line = next(line for line in read_record("run") if line["type"] == "step")
    assert heard[0] == ("tensorboard", 1)
    assert ("train/loss", line["loss"], 2) in heard
    assert {name for name, *_ in heard if name.startswith("valid/")} == {"valid/loss", "valid/perplexity"}
    assert heard[-1] == ("closed",)
    heard.clear()
    wandb = ModuleType("wandb")

    class Started:
        def __init__(self, **about: Any) -> None:
            self.summary: dict[str, Any] = {}
            heard.append((about["project"], about["name"], about["id"]))

        def log(self, values: dict[str, float]) -> None:
            heard.append(("log", values["step"]))

        def finish(self) -> None:
            heard.append(("finished", self.summary["status"]))

    wandb.init = Started  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    assert lm_train("--config", config, "--out", "my run", "--wandb", "mine") == 0
    digest = read_record("my run")[0]["digest"]
    assert heard[0] == ("mine", "my run", f"my-run-{digest}")  # a folder of another name is another run
    assert ("log", 2) in heard
    assert heard[-1] == ("finished", "done")
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it raises ImportError
    capsys.readouterr()
    assert lm_train("--config", config, "--out", "other", "--wandb", "mine") == 2
    assert capsys.readouterr().err == "error: wandb is not installed; it comes with: pip install 'rebased[log]'\n"
    assert not os.path.exists("other")


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("lm/*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_config_loads_and_survives_being_written(path: Path) -> None:
    config = load_config(LMRunConfig, path)
    again = LMRunConfig.model_validate(config.model_dump(mode="json"))
    assert again == config
    assert again.digest() == config.digest()


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("attention", 126_807_552),  # these three: Table 9
        ("based", 156_955_392),
        ("paper-checkpoint", 156_992_256),
        ("paper-text", 145_453_824 + 6_912),
    ],
)
def test_the_papers_models_and_their_training(name: str, parameters: int) -> None:
    config = load_config(LMRunConfig, CONFIGS / "lm" / f"{name}.yaml")
    assert count_parameters(config.model) == parameters
    train = config.train
    assert (train.steps, train.warmup_steps, train.lr, train.weight_decay, train.clip_norm) == (
        20_000,
        200,
        1e-3,
        0.1,
        1,
    )
    assert (config.data.seq_len, train.batch_size, train.final_lr, train.betas) == (4096, 1024, 0.1, (0.9, 0.95))


def test_based_with_a_window_has_the_layers_of_its_authors() -> None:
    config = load_config(LMRunConfig, CONFIGS / "lm" / "based-window.yaml")
    places: dict[str, list[int]] = {}
    for layer in range(config.model.n_layers):
        places.setdefault(config.model.mixer_of(layer).name, []).append(layer)
    assert places["based"] == [1, 6, 11, 16, 21]
    assert places["sliding_window"] == [2, 7, 12, 17, 22]
    assert len(places["short_conv"]) == 17
    tokens = config.train.steps * config.train.batch_size * config.data.seq_len
    assert (config.train.lr, config.model.positions, round(tokens / 1e9)) == (8e-4, "none", 10)


def test_the_three_models_on_enwik8_differ_in_the_model_alone() -> None:
    points = load_sweep(CONFIGS / "sweeps" / "enwik8.yaml", {}).points
    configs = [point.config for point in points if point.config.train.seed == 42]
    assert (len(points), len(configs)) == (9, 3)
    assert len({config.train for config in configs}) == len({config.data for config in configs}) == 1
    counts = [count_parameters(config.model) for config in configs]
    assert max(counts) < 1.02 * min(counts)
    assert 20e6 < min(counts) < 40e6
