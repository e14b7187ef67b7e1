"""The training benchmark at a size for CI: it measures, it judges, and a row that fails does not stop it."""

import json
from pathlib import Path

import pytest

from benchmark_command import succeed

SMALL = ["--device", "cpu", "--rows", "1", "--lengths", "256", "--widths", "64", "--precisions", "fp32"]
BROKEN_HEAD = """
import rebased.models, rebased.ops, rebased.train  # which keep the head that they imported

def broken(*_):
    raise RuntimeError("no such block")

rebased.ops.linear_cross_entropy = broken
"""
QUICK = ["--repeats", "1", "--examples", "4", "--presets", "rebased"]


@pytest.mark.release
def test_small(tmp_path: Path) -> None:
    sections = ["targets", "presets", "head", "data", "together"]
    words = [*SMALL, *QUICK, "--at-once", "2", "--only", *sections, "--out", str(tmp_path)]
    said = succeed("train", *words, patch=BROKEN_HEAD)
    (path,) = tmp_path.glob("*.json")
    result = json.loads(path.read_text())
    assert str(tmp_path) not in path.read_text()
    rows = {name: [row for row in result["rows"] if row["section"] == name] for name in sections}
    assert [(row["T"], row["D"], row["mode"], row["target_ms"]) for row in rows["targets"]] == [(256, 64, "eager", 6)]
    assert rows["targets"][0]["ms"] > 0
    assert rows["targets"][0]["loss_last"] < rows["targets"][0]["loss_first"]
    assert [row["preset"] for row in rows["presets"]] == ["rebased"]
    assert {row["error"] for row in rows["head"]} == {"RuntimeError: no such block"}
    assert rows["data"][0]["seconds"] > 0
    assert rows["together"][0]["runs_per_hour"] > 0
    verdict = "met" if rows["targets"][0]["ms"] <= 6 else "MISSED"
    assert f"6  {verdict}" in said


def test_no_row_is_begun_after_the_time_limit(tmp_path: Path) -> None:
    said = succeed("train", *SMALL, *QUICK, "--seconds", "0", "--out", str(tmp_path))
    (path,) = tmp_path.glob("*.json")
    assert json.loads(path.read_text())["rows"] == []
    assert "the time limit of 0.0 s is reached" in said
