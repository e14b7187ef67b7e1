"""The operator's benchmark at a size for CI: it runs whole, refuses what is wrong, and never overwrites a result."""

import json
from pathlib import Path

import pytest
import torch

from benchmark_command import BENCHMARKS, benchmark, succeed
from tolerances import KERNEL_ERRORS

PUBLISHED = sorted((BENCHMARKS / "results").glob("ops-*.json"))
WRONG_GRADIENT = """
import torch
import rebased.ops

class Wrong(torch.autograd.Function):  # hands on its input, and 1 % too much of the gradient
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dx):
        return 1.01 * dx

right = rebased.ops.poly_attention

def attend(q, *others, **settings):  # right in fp64, which all are compared with
    return right(q if q.dtype == torch.float64 else Wrong.apply(q), *others, **settings)

rebased.ops.poly_attention = attend
"""
ONE_MOMENT = """
import datetime

class Stopped(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls(2026, 1, 2, 3, 4, 5, tzinfo=tz)

datetime.datetime = Stopped
"""


@pytest.mark.release
def test_small(tmp_path: Path) -> None:
    said = succeed("ops", "--device", "cpu", "--quick", "--out", str(tmp_path))
    (path,) = tmp_path.glob("*.json")
    record = json.loads(path.read_text())
    done = {(row["way"], row["T"]) for row in record["lengths"] if row.get("eager_both_ms", 0) > 0}
    assert done == {(way, T) for way in ("ours", "SDPA Flash") for T in (64, 256)}
    assert all(
        row["error"] < KERNEL_ERRORS[torch.float32] for row in record["lengths"] if (row["way"], row["T"]) in done
    )
    assert "SDPA cuDNN" in record["left_out"]  # it has no CPU version
    assert record["decode"]["eager_ms"] > 0
    assert record["command"] == "python benchmarks/ops.py --device cpu --quick"
    assert str(tmp_path) not in path.read_text()
    assert path.with_suffix(".svg").stat().st_size > 10_000
    assert "forward / forward+backward" in said


@pytest.mark.release
def test_one_pass() -> None:
    lines = succeed("one_pass", "--device", "cpu").splitlines()
    assert lines[0] == "T = 200, K = 16, V = 64, bfloat16: finite"
    assert len(lines) == 7
    assert all(line.endswith(": finite") for line in lines)


@pytest.mark.release
def test_a_wrong_way_is_not_timed(tmp_path: Path) -> None:
    words = ("--device", "cpu", "--quick", "--sections", "lengths", "--out", str(tmp_path))
    answer = benchmark("ops", *words, patch=WRONG_GRADIENT)
    assert answer.returncode == 1
    assert "wrong, so not timed: ours" in answer.stderr
    (path,) = tmp_path.glob("*.json")
    ours = [row for row in json.loads(path.read_text())["lengths"] if row["way"] == "ours"]
    assert ours
    for row in ours:
        assert "off by" in row["wrong"]
        assert not any(key.endswith("_ms") for key in row)


@pytest.mark.release
def test_an_older_result_stays(tmp_path: Path) -> None:
    words = ("--device", "cpu", "--quick", "--sections", "decode", "--out", str(tmp_path))
    succeed("ops", *words, patch=ONE_MOMENT)
    (path,) = tmp_path.glob("*.json")
    assert path.name.startswith("ops-2026-01-02-030405-")
    before = path.read_bytes()
    answer = benchmark("ops", *words, patch=ONE_MOMENT)
    assert answer.returncode == 1
    assert "FileExistsError" in answer.stderr
    assert path.read_bytes() == before


@pytest.mark.skipif(not PUBLISHED, reason="no result of benchmarks/ops.py is committed yet")
def test_the_newest_published_result_can_be_drawn(tmp_path: Path) -> None:
    record = json.loads(PUBLISHED[-1].read_text())
    said = succeed("ops_report", str(PUBLISHED[-1]), "--plot", str(tmp_path / "plot.svg"))
    assert (tmp_path / "plot.svg").stat().st_size > 10_000
    assert f"{record['lengths'][-1]['T']:,}" in said
