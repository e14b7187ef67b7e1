"""The language models' benchmarks at a size for CI: they run whole, and what they leave says what was measured."""

import json
from pathlib import Path

import pytest

from benchmark_command import succeed


@pytest.mark.release
def test_steps_and_where_their_time_goes(tmp_path: Path) -> None:
    size = ["--tokens", "64", "--lengths", "32", "16", "--compile", "none", "--device", "cpu", "--profile"]
    said = succeed("lm", *size, "--models", "attention", "paper-text", "--out", str(tmp_path))
    (path,) = tmp_path.glob("*.json")
    record = json.loads(path.read_text())
    assert [(row["model"], row["T"], row["batch"]) for row in record["steps"]] == [
        ("attention", 32, 2),
        ("paper-text", 32, 2),
        ("attention", 16, 4),
        ("paper-text", 16, 4),
    ]
    for row in record["steps"]:
        assert row["tokens_per_second"] == pytest.approx(64 / row["seconds"])
        assert sum(row["profile"]["groups"].values()) >= 0.99 * row["profile"]["wall_ms"]
    assert str(tmp_path) not in path.read_text()
    assert path.with_suffix(".svg").stat().st_size > 10_000
    assert "paper-text" in said


@pytest.mark.release
def test_nothing_is_begun_after_the_time_is_over(tmp_path: Path) -> None:
    words = ("--minutes", "0", "--device", "cpu", "--lengths", "16", "--models", "based", "--out", str(tmp_path))
    succeed("lm", *words)
    (path,) = tmp_path.glob("*.json")
    record = json.loads(path.read_text())
    assert record["steps"] == []
    assert record["left_out"] == [{"model": "based", "T": 16, "reason": "the time was over"}]


def test_ratios_are_also_told_over_the_fastest_attention(tmp_path: Path) -> None:
    speeds = {"attention": 100.0, "attention-cudnn": 120.0, "paper-text": 150.0}
    rows = [{"model": model, "T": 4096, "tokens_per_second": speed} for model, speed in speeds.items()]
    rows.append({"model": "paper-text", "T": 8192, "tokens_per_second": 150.0})
    record = tmp_path / "lm.json"
    record.write_text(json.dumps({"steps": [{"peak_bytes": None} | row for row in rows]}))
    lines = succeed("lm_report", str(record)).splitlines()
    cells = {line.split("│")[1].strip(): line.split("│")[-4:-1] for line in lines if line.count("│") > 3}
    assert [cell.strip() for cell in cells["4,096"]] == ["1.50", "1.25", "0.9"]
    assert [cell.strip() for cell in cells["8,192"]] == ["", "", ""]
