"""The operator's benchmark at a size for CI: it runs whole, refuses what is wrong, and never overwrites a result."""

import json
from pathlib import Path

import pytest
import torch
from benchmarks import one_pass, ops, ops_report
from torch import Tensor

from rebased.ops import REBASED, poly_attention
from tolerances import KERNEL_ERRORS

PUBLISHED = sorted((Path(ops.__file__).parent / "results").glob("ops-*.json"))


def test_small(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = ops.main(["--device", "cpu", "--quick", "--out", str(tmp_path)])
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
    assert "forward / forward+backward" in capsys.readouterr().out


def test_one_pass(capsys: pytest.CaptureFixture[str]) -> None:
    one_pass.main("cpu")
    assert capsys.readouterr().out == "T = 200: finite\nT = 2,100: finite\nT = 8,300: finite\n"


class WrongGradient(torch.autograd.Function):
    """Hands on its input, and 1 % too much of the gradient."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, dx: Tensor) -> Tensor:
        return 1.01 * dx


def test_a_wrong_way_is_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return poly_attention(WrongGradient.apply(q), k, v, coefficients=REBASED)

    monkeypatch.setattr(ops, "ways", lambda _: ([ops.Way("ours", attend, REBASED, ours=True)], {}))
    with pytest.raises(SystemExit, match="wrong, so not timed: ours"):
        ops.main(["--device", "cpu", "--sections", "lengths", "--out", str(tmp_path)])
    (path,) = tmp_path.glob("*.json")
    for row in json.loads(path.read_text())["lengths"]:
        assert "off by" in row["wrong"]
        assert not any(key.endswith("_ms") for key in row)


def test_an_older_result_stays(tmp_path: Path) -> None:
    record = {"date": "2026-01-02T03:04:05+00:00", "machine": {"device": "NVIDIA H200"}}
    path = ops.save(record, tmp_path)
    assert path.name == "ops-2026-01-02-030405-h200.json"
    with pytest.raises(FileExistsError):
        ops.save({**record, "what": "another"}, tmp_path)
    assert json.loads(path.read_text()) == record


@pytest.mark.skipif(not PUBLISHED, reason="no result of benchmarks/ops.py is committed yet")
def test_the_newest_published_result_can_be_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = json.loads(PUBLISHED[-1].read_text())
    ops_report.draw(record, tmp_path / "plot.svg")
    assert (tmp_path / "plot.svg").stat().st_size > 10_000
    ops_report.show(record)
    assert f"{record['lengths'][-1]['T']:,}" in capsys.readouterr().out
