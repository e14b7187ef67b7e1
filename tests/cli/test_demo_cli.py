"""rebased demo, as it is typed, with a task of seconds."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from rebased.analysis import sign_test
from rebased.analysis.paired import SIGNIFICANT
from rebased.cli import main
from rebased.cli.demo import MODELS, SEEDS, demo_configs
from rebased.runs.record import read_record

COMMAND = [sys.executable, "-c", "from rebased.cli import main; main()"]
TINY = {
    "task": {
        "vocab_size": 24,
        "train": [{"seq_len": 12, "kv_pairs": 2, "examples": 32}],
        "test": [{"seq_len": 12, "kv_pairs": 2, "examples": 16}, {"seq_len": 12, "kv_pairs": 3, "examples": 16}],
    },
    "model": {"preset": "rebased", "d_model": 12, "mixers": {1: {"n_heads": 1}}},
    "train": {"epochs": 3, "batch_size": 8, "lr": 0.01, "device": "cpu"},
}
WORDS = ["demo", "--config", "tiny.yaml", "--seeds", "1", "--out", "out"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A config file in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("REBASED_TRACEBACK", raising=False)
    write_config()


def write_config(**train: float) -> None:
    Path("tiny.yaml").write_text(yaml.safe_dump(TINY | {"train": {**TINY["train"], **train}}))


def rebased(*words: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(words)
    return int(left.value.code or 0)


def records() -> dict[str, list[dict]]:
    return {path.parent.name.split("-")[0]: read_record(path) for path in Path("out").glob("*/record.jsonl")}


def epochs_of(lines: list[dict]) -> list[int]:
    return [line["epoch"] for line in lines if line["type"] == "epoch"]


def start_and_wait_for_an_epoch() -> subprocess.Popen[str]:
    process = subprocess.Popen([*COMMAND, *WORDS], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    while " epoch " not in process.stdout.readline():
        assert process.poll() is None
    return process


def test_the_demo_from_start_to_end(capsys: pytest.CaptureFixture[str]) -> None:
    assert rebased(*WORDS) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert len(re.findall(r"epoch +\d/3  loss \d\.\d+  accuracy \d\.\d+", captured.out)) == 9
    assert captured.out.endswith("wrote out/report.html: open it in a browser\n")
    runs = records()
    assert set(runs) == set(MODELS)
    page = Path("out/report.html").read_text()
    for model, shown in zip(MODELS, ("ReBased", "Based", "ConvAttention"), strict=True):
        best = f"{runs[model][-1]['accuracy']:.3f}"
        recalled = f"It recalled {runs[model][-1]['accuracy']:.1%} of what it was asked."
        assert f"\n{shown} reached accuracy 0.9 in none of its runs. {recalled}\n" in captured.out
        assert (
            f'<th scope="row">{shown}</th><td>&gt;3</td><td>{best}</td><td>{runs[model][0]["parameters"]:,}</td>'
            in page
        )
        assert runs[model][0]["machine"]["threads"] == 1
    for text in (captured.out, page):
        assert "ReBased and Based did not differ with any seed. With 1 seed no result can decide which learns" in text
        assert "ReBased and ConvAttention did not differ with any seed." in text
    assert "By number of pairs" in page
    assert "rebased demo --out out --seeds 1 --config tiny.yaml" in page
    embedded = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page)[1])
    assert {name.split("-")[0]: lines for name, lines in embedded.items()} == runs

    before = {path: path.read_bytes() for path in Path("out").rglob("*") if path.is_file()}
    assert rebased(*WORDS) == 0  # runs that are done are not repeated, and the page of the same records is the same
    assert " epoch " not in capsys.readouterr().out
    assert {path: path.read_bytes() for path in Path("out").rglob("*") if path.is_file()} == before


def test_in_a_terminal_each_run_has_a_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    assert rebased(*WORDS) == 0
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", capsys.readouterr().out)
    for model in MODELS:
        assert re.search(rf"{model} seed 42 +━+ +done: best accuracy \d\.\d+", shown)


@pytest.mark.release  # the demo trains as a sweep does, which test_sweep_cli.py interrupts
def test_ctrl_c_saves_and_the_same_command_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    write_config(epochs=15, stop_above=1)
    process = start_and_wait_for_an_epoch()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 130
    assert err == ""
    assert out.splitlines()[-1] == (
        "interrupted, saved; continue with: rebased demo --out out --seeds 1 --config tiny.yaml"
    )
    assert not Path("out/report.html").exists()
    done = {model: epochs_of(lines) for model, lines in records().items()}
    assert rebased(*WORDS) == 0
    assert set(records()) == set(MODELS)
    assert all(epochs_of(lines) == list(range(1, 16)) for lines in records().values())
    repeated = re.findall(r"(\w+) seed 42 +epoch +(\d+)/", capsys.readouterr().out)
    assert not {(model, str(epoch)) for model, epochs in done.items() for epoch in epochs} & set(repeated)


def test_kill_9_leaves_no_process_and_nothing_is_lost() -> None:
    write_config(epochs=400, stop_above=1)
    process = start_and_wait_for_an_epoch()
    process.kill()
    process.communicate(timeout=300)
    for _ in range(100):  # the runs end when they find nobody listening
        sizes = [path.stat().st_size for path in Path("out").glob("*/record.jsonl")]
        time.sleep(0.3)
        if sizes == [path.stat().st_size for path in Path("out").glob("*/record.jsonl")]:
            break
    for lines in records().values():
        assert epochs_of(lines) == list(range(1, 1 + len(epochs_of(lines))))
        assert len(epochs_of(lines)) < 400


def test_a_run_that_diverges_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    write_config(lr=1e30, eps=1e-30)
    assert rebased(*WORDS) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert "Try a lower rate" in error
    assert not Path("out/report.html").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--seeds", "0"], "--seeds 0: give 1 or more"),
        (["--config", "nowhere.yaml"], "nowhere.yaml: No such file or directory"),
    ],
)
def test_bad_input(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    assert rebased("demo", *words) == 2
    assert message in capsys.readouterr().err
    assert os.listdir() == ["tiny.yaml"]


def test_a_file_in_the_way_is_said_before_training(capsys: pytest.CaptureFixture[str]) -> None:
    Path("out").mkdir()
    Path("out/report.html").write_text("my notes")
    assert rebased("demo", "--out", "tiny.yaml") == 2
    assert capsys.readouterr().err == "error: tiny.yaml is a file; choose a folder (--out)\n"
    assert rebased(*WORDS) == 2
    assert "out/report.html is not a page that rebased has written" in capsys.readouterr().err
    assert os.listdir("out") == ["report.html"]


def test_the_demo_treats_its_models_alike() -> None:
    configs = demo_configs(None, seeds=2)
    assert len(configs) == 6
    assert len({config.task.digest() for config in configs.values()}) == 1
    assert len({config.model.d_model for config in configs.values()}) == 1
    for model in MODELS:
        trains = [config.train for name, config in configs.items() if name.startswith(f"{model} ")]
        assert [train.seed for train in trains] == [42, 43]
        assert len({train.model_copy(update={"seed": 0}).digest() for train in trains}) == 1
    assert {config.train.device for config in configs.values()} == {"cpu"}


def test_the_demo_claims_no_winner_that_another_cpu_could_contradict() -> None:
    """Its few seeds cannot decide; the number of seeds that its page recommends can."""
    assert sign_test(SEEDS, 0) >= SIGNIFICANT
    assert sign_test(8, 0) < SIGNIFICANT
