"""benchmarks/sweep_hours.py: hours from recorded steps."""

import json
import re
from pathlib import Path

import pytest

from benchmark_command import benchmark, succeed


def write_records(folder: Path, scale: float) -> None:
    """Steps of ReBased that take scale * (20 + D / 4) ns per token, and of Based that take half as long."""
    about = {"section": "targets", "preset": "rebased", "precision": "tf32"}
    shapes = ((256, 64), (512, 128), (2048, 512))
    rows = [about | {"T": T, "D": D, "ms": scale * 512 * T * (20 + D / 4) / 1e6} for T, D in shapes]
    slower = [{**row, "ms": 2 * row["ms"]} for row in rows]  # the faster of two modes counts
    about = {"section": "presets", "precision": "bf16", "mode": "captured"}
    times = {("rebased", 256): 4.0, ("based", 256): 2.0, ("rebased", 2048): 30.0, ("based", 2048): 60.0}
    rows += [about | {"preset": preset, "T": T, "ms": ms} for (preset, T), ms in times.items()]
    (folder / "train-2026-01-01-cuda.json").write_text(json.dumps({"rows": [*slower, *rows]}))


def test_a_run_costs_its_tokens(tmp_path: Path) -> None:
    scale = 1e5
    write_records(tmp_path, scale)
    said = succeed("sweep_hours", "table1-small", "--results", str(tmp_path))
    line = re.search(r"ReBased: ([\d.]+) \+ ([\d.]+) D ns per token", said)
    assert line is not None
    assert [float(number) for number in line.groups()] == pytest.approx([20 * scale, scale / 4])
    found = re.search(r"table1-small +60 runs +(\d+) GPU hours +T = 256 100%", said)
    assert found is not None
    tokens = 12 * 256 * (100_000 + 6000 / 3)  # of a run; evaluation counts a third
    nanoseconds = scale * ((20 + 24 / 4) + (20 + 32 / 4))  # per token, at both widths
    hours = 5 * (5 + 1 / 2) * tokens * nanoseconds * 1e-9 / 3600  # five seeds of five kernels, and of Based
    assert float(found[1]) == pytest.approx(hours, rel=1e-4)


def test_records_that_are_not_there(tmp_path: Path) -> None:
    answer = benchmark("sweep_hours", "--results", str(tmp_path))
    assert answer.returncode == 1
    assert "has section targets with" in answer.stderr
