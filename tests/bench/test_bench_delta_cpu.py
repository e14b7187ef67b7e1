"""The benchmark of the gate and the delta rule on a CPU."""

import json
from pathlib import Path

from benchmark_command import succeed


def test_writes_a_record(tmp_path: Path) -> None:
    succeed("delta_cpu", "-T", "64", "--turns", "1", "--out", str(tmp_path))
    (path,) = tmp_path.iterdir()
    rows = json.loads(path.read_text())["rows"]
    assert rows[0]["what"] == "poly_attention"
    assert all(row["ms"] > 0 for row in rows)
    assert rows[0]["ratio"] == 1
