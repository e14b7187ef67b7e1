"""The benchmark of the gate, at a small size: on a CPU it only compares with fp64."""

from pathlib import Path

from benchmark_command import succeed


def test_it_compares_and_writes_a_record(tmp_path: Path) -> None:
    said = succeed("gate_gpu", "--lengths", "64", "--rounds", "1", "--out", str(tmp_path))
    assert "largest error" in said
    assert len(list(tmp_path.glob("gate_gpu-*.json"))) == 1
