"""The benchmark of batch invariance at a size for CI: both ways are measured, and the record says how."""

import json
from pathlib import Path

import pytest

from benchmark_command import succeed


@pytest.mark.release
def test_both_ways_are_measured(tmp_path: Path) -> None:
    said = succeed("invariant", "--tiny", "--device", "cpu", "--out", str(tmp_path))
    (path,) = tmp_path.glob("invariant-*-cpu.json")
    record = json.loads(path.read_text())
    assert [(row["batch"], row["batch_invariant"]) for row in record["rows"]] == [
        (1, False), (1, True), (3, False), (3, True)
    ]  # fmt: skip
    assert all(row["tokens_per_second"] == pytest.approx(3 * row["batch"] / row["seconds"]) for row in record["rows"])
    assert "with batch_invariant" in said
    assert str(tmp_path) not in path.read_text()
