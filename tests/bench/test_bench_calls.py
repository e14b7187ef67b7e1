"""Benchmarks of calls on a GPU: eager calls, widths, first calls. Elsewhere they say what they need."""

import json
from pathlib import Path

import pytest
import torch

from benchmark_command import benchmark, succeed

COMMANDS = {
    "eager": ["--processes", "1"],
    "widths": [],
    "first_call": ["--run", "-T", "64"],
    "self_check": [],
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("name", COMMANDS)
def test_without_a_gpu(name: str, tmp_path: Path) -> None:
    answer = benchmark(name, *COMMANDS[name], "--out", str(tmp_path))
    assert (answer.returncode, answer.stderr.strip()) == (1, "no CUDA device here")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.gpu
@pytest.mark.parametrize("name", COMMANDS)
def test_writes_a_record(name: str, tmp_path: Path) -> None:
    """One file, which names the command and the machine; every number in it is a time."""
    succeed(name, *COMMANDS[name], "--out", str(tmp_path))
    (path,) = tmp_path.iterdir()
    record = json.loads(path.read_text())
    assert record["command"].startswith(f"python benchmarks/{name}.py")
    assert record["machine"]["gpu"]
    times = {
        "eager": lambda: list(record["median"].values()),
        "widths": lambda: [row["rebased"][key] for row in record["rows"] for key in ("forward_ms", "both_ms")],
        "self_check": lambda: [row["ms"] for row in record["rows"]],
        "first_call": lambda: [row[key] for row in record["rows"]["together"] for key in ("first", "second")],
    }[name]()
    assert len(times) >= 2
    assert min(times) > 0
