"""rebased sweep, as it is typed."""

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from rebased.cli import main
from rebased.train import read_record

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-c", "from rebased.cli import main; main()"]
BASE: dict[str, Any] = {
    "task": {
        "vocab_size": 24,
        "train": [{"seq_len": 12, "kv_pairs": 2, "examples": 32}],
        "test": [{"seq_len": 12, "kv_pairs": 2, "examples": 16}],
    },
    "model": {"preset": "rebased", "d_model": 12, "mixers": {1: {"n_heads": 1}}},
    "train": {"epochs": 3, "batch_size": 8, "lr": 0.01, "device": "cpu"},
}
WORDS = ["sweep", "tiny.yaml", "-o", "out"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("REBASED_TRACEBACK", raising=False)
    write({"model.preset": ["rebased", "based"], "train.seed": [1, 2]})


def write(grid: dict[str, Any], **train: float) -> None:
    base = BASE | {"train": {**BASE["train"], **train}}
    Path("tiny.yaml").write_text(yaml.safe_dump({"base": base, "grid": grid}))


def rebased(*words: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(words)
    return int(left.value.code or 0)


def records() -> dict[str, list[dict[str, Any]]]:
    return {path.parent.name: read_record(path) for path in Path("out").glob("*/record.jsonl")}


def epochs_of(lines: list[dict[str, Any]]) -> list[int]:
    return [line["epoch"] for line in lines if line["type"] == "epoch"]


def test_a_dry_run_prints_the_plan_and_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert rebased(*WORDS, "--dry-run", "--workers", "1") == 0
    out = capsys.readouterr().out
    assert re.search(r"^rebased +D 12, T 12 +2 +- +- +- *$", out, flags=re.MULTILINE)
    assert re.search(r"^based +D 12, T 12 +2 ", out, flags=re.MULTILINE)
    assert "4 runs: 0 done, 4 to train in out" in out
    assert "1 process of this machine, one CPU thread each" in out
    assert re.search(r"about \d+ s, from 3 steps of each model, timed just now", out)
    assert os.listdir() == ["tiny.yaml"]


def test_a_sweep_from_start_to_end_and_over_again(capsys: pytest.CaptureFixture[str]) -> None:
    assert rebased(*WORDS) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    runs = records()
    assert len(runs) == 4
    for digest, lines in runs.items():
        assert lines[0]["digest"] == digest
        assert epochs_of(lines) == [1, 2, 3]
        assert lines[0]["machine"]["threads"] == 1
    for line in re.findall(r"^\d/4  .*", captured.out, flags=re.MULTILINE):
        model, seed, accuracy = re.search(r"(\w+), D 12, T 12, lr 0\.01, seed (\d): accuracy (\d\.\d+)", line).groups()
        (run,) = [
            lines
            for lines in runs.values()
            if lines[0]["config"]["model"]["mixers"][1]["name"] == model
            and lines[0]["config"]["train"]["seed"] == int(seed)
        ]
        assert accuracy == f"{run[-1]['accuracy']:.4f}"
    assert captured.out.endswith("4 of 4 runs done; out\n")

    before = {path: path.read_bytes() for path in Path("out").glob("*/*")}
    write({"model.preset": ["rebased", "based"], "train.seed": [1, 2, 3]})
    assert rebased(*WORDS) == 0  # a larger grid in the same folder: only what is new is trained
    out = capsys.readouterr().out
    assert "6 runs: 4 done, 2 to train" in out
    assert "the records of this folder" in out
    assert len(re.findall(r"accuracy \d", out)) == 2
    assert {path: path.read_bytes() for path in before} == before
    asked = [json.loads(line) for line in Path("out/sweep.jsonl").read_text().splitlines()]
    assert [(line["type"], line["file"], len(line["runs"])) for line in asked] == [
        ("sweep", "tiny.yaml", 4),
        ("sweep", "tiny.yaml", 6),
    ]
