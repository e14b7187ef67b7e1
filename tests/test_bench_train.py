"""The training benchmark at a size for CI: it measures, it judges, and a row that fails does not stop it."""

import json
from pathlib import Path

import pytest
from benchmarks import train as bench

SMALL = ["--device", "cpu", "--rows", "1", "--lengths", "256", "--widths", "64", "--precisions", "fp32"]
QUICK = ["--repeats", "1", "--examples", "4", "--presets", "rebased"]


def test_small(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no such block")

    monkeypatch.setattr(bench, "linear_cross_entropy", broken)
    sections = ["targets", "presets", "head", "data", "together"]
    path = bench.main([*SMALL, *QUICK, "--at-once", "2", "--only", *sections, "--out", str(tmp_path)])
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
    assert f"6  {verdict}" in capsys.readouterr().out


def test_no_row_is_begun_after_the_time_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = bench.main([*SMALL, *QUICK, "--seconds", "0", "--out", str(tmp_path)])
    assert json.loads(path.read_text())["rows"] == []
    assert "the time limit of 0.0 s is reached" in capsys.readouterr().out


def test_pairs_are_summed_up() -> None:
    rows = [{"differences": {"tf32": value}} for value in (0.01, -0.01, 0.02, 0.0, -0.02)]
    found = bench.summary(rows)["tf32"]
    assert found["mean_difference"] == pytest.approx(0)
    low, high = found["interval"]
    assert high == pytest.approx(-low)
    assert high == pytest.approx(2.776 * 0.0158114 / 5**0.5, rel=1e-3)  # Student's t with 4 degrees of freedom
