"""rebased demo, as it is typed, with a task of seconds."""

import json
import os
import re
from pathlib import Path

import pytest
import yaml

from command_line import rebased
from rebased.cli import demo as demo_verb
from rebased.cli.demo import SEEDS, SHIPPED, SWEEP
from rebased.evaluate.attention_speed import Timing
from rebased.report.demo_figures import labelled
from rebased.runs.collect import collect
from rebased.runs.shipped import find_config
from rebased.train.sweep.grid import load_sweep

TINY = {
    "base": {
        "task": {
            "vocab_size": 24,
            "train": [{"seq_len": 12, "kv_pairs": 2, "examples": 32}],
            "test": [{"seq_len": 12, "kv_pairs": 2, "examples": 16}, {"seq_len": 12, "kv_pairs": 3, "examples": 16}],
        },
        "model": {"d_model": 12, "mixers": {1: {"n_heads": 1}}, "positions": "none"},
        "train": {"epochs": 2, "batch_size": 8, "lr": 0.01, "device": "cpu"},
    },
    "grid": {"train.seed": [1], "model.preset": ["linear_attention", "rebased"]},
}
WORDS = ["demo", "--config", "tiny.yaml", "--seeds", "2", "--out", "out"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep of two models in the current folder; attention is not timed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("REBASED_TRACEBACK", raising=False)
    monkeypatch.setattr(demo_verb, "time_attention", lambda: [Timing(T, T, T * T, T, T * T / 512) for T in (256, 1024)])
    write_sweep()


def write_sweep(**train: float) -> None:
    base = TINY["base"]
    tree = TINY | {"base": {**base, "train": {**base["train"], **train}}}
    Path("tiny.yaml").write_text(yaml.safe_dump(tree))


def test_the_demo_from_start_to_end(capsys: pytest.CaptureFixture[str]) -> None:
    assert rebased(*WORDS, "--json", "result.json") == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert "about " in captured.out  # an estimate of the time
    assert "suite-quick" not in Path("out/report.html").read_text()  # no link to a page that is not there
    assert "Recall: at 3 pairs ReBased answers " in captured.out
    assert captured.out.splitlines()[-2] == "wrote out/report.html: open it in a browser"
    result = json.loads(Path("result.json").read_text())
    assert len(result["answers"]) == 3
    assert set(result["decided"]) == {"LinearAttention, keys of 16"}
    page = Path("out/report.html").read_text()
    for answer in result["answers"]:
        assert answer in captured.out
        assert answer in page
    assert "from about 500 tokens on" in page
    assert "rebased demo --config tiny.yaml --seeds 2 --out out" in page
    embedded = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page)[1])
    assert len(embedded["runs"]) == 4
    assert list(embedded["keys_held"]) == ["LinearAttention, keys of 16", "ReBased, keys of 16"]

    before = {path: path.read_bytes() for path in Path("out").rglob("*.*") if path.name != "sweep.jsonl"}
    assert rebased(*WORDS) == 0  # runs that are done are not repeated, and the page of the same numbers is the same
    assert " epoch " not in capsys.readouterr().out
    assert {path: path.read_bytes() for path in Path("out").rglob("*.*") if path.name != "sweep.jsonl"} == before


def test_a_run_that_diverges_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    write_sweep(lr=1e30, eps=1e-30)
    assert rebased(*WORDS) == 2
    assert "diverged; the page needs all models" in capsys.readouterr().err
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


def test_the_demo_holds_equal_what_its_page_says() -> None:
    points = load_sweep(find_config(SWEEP, "sweep"), {}).points
    configs = [point.config for point in points]
    assert len(configs) == 5 * SEEDS
    assert len({config.task.digest() for config in configs}) == 1
    assert len({config.model.d_model for config in configs}) == 1
    assert len({(config.train.epochs, config.train.batch_size, config.train.device) for config in configs}) == 1


def test_shipped_runs_are_of_the_same_sweep_with_other_seeds() -> None:
    shipped, fresh = collect([SHIPPED]).runs, load_sweep(find_config(SWEEP, "sweep"), {}).points
    seeds = {run.seed for run in shipped}
    assert not seeds & {point.config.train.seed for point in fresh}
    again = load_sweep(find_config(SWEEP, "sweep"), {"grid.train.seed": str(sorted(seeds))}).points
    assert {point.config.digest() for point in again} == {run.digest for run in shipped}
    states = {name: group[0].state_bytes(64) for name, group in labelled(shipped).items()}
    assert states["LinearAttention, keys of 36"] == states["ReBased, keys of 8"] == 5008
