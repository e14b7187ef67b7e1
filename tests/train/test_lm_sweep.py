"""A sweep over language models: planned, estimated, trained, resumed and reported like any other."""

import re
import shutil
from pathlib import Path

import pytest
import yaml

import tiny_lm_run
from command_line import rebased
from rebased.runs.record import read_record
from rebased.train.sweep.cost import estimate
from rebased.train.sweep.cost import time_steps as timed
from rebased.train.sweep.grid import load_sweep
from rebased.train.sweep.plan import make_plan


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    text = tiny_lm_run.write_text(tmp_path / "text")
    base = tiny_lm_run.tiny(text).model_dump(mode="json")
    grid = {"train.seed": [1, 2], "models": [{"model.mixers": ["short_conv", "attention"]}, {"model.mlp_ratio": 1}]}
    path = tmp_path / "sweep.yaml"
    path.write_text(yaml.safe_dump({"base": base, "grid": grid}))
    return path


def test_it_is_a_sweep_like_any_other(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert rebased("sweep", "sweep.yaml", "--out", "runs", "--workers", "1") == 0
    said = capsys.readouterr().out
    assert "4 runs: 0 done, 4 to train in runs" in said
    assert "text, T = 16" in said
    assert "4 of 4 runs done" in said
    records = [read_record(folder) for folder in Path("runs").iterdir() if folder.is_dir()]
    assert [lines[-1]["status"] for lines in records] == ["done"] * 4
    alone = tiny_lm_run.run(load_sweep(sweep, {}).points[0].config, Path("alone"))  # type: ignore[arg-type]
    together = Path("runs") / load_sweep(sweep, {}).points[0].config.digest()
    assert alone.status == "done"
    want = pytest.approx(tiny_lm_run.losses(Path("alone")), rel=1e-4)  # a worker computes without oneDNN
    assert tiny_lm_run.losses(together) == want
    assert rebased("sweep", "sweep.yaml", "--out", "runs", "--workers", "1") == 0
    assert "4 done, 0 to train" in capsys.readouterr().out
    assert rebased("report", "runs", "-o", "page.html") == 0
    assert "erplexity" in Path("page.html").read_text()


class Clock:
    """An executor that trains nothing: a multiply-add takes a nanosecond."""

    workers, gpus, where = 1, 0, "nowhere"

    def call(self, function: object, *arguments: object) -> object:
        return [1e-9] if function is timed else None

    def close(self) -> None: ...


def test_its_time_is_estimated(sweep: Path, tmp_path: Path) -> None:
    """The estimate grows with the number of steps. It is not known if no model can be timed."""
    plans = [
        make_plan(load_sweep(sweep, {"train.steps": steps}).points, tmp_path / "runs", {}) for steps in ("12", "1200")
    ]
    few, many = (estimate(plan.runs, plan.runs, Clock()) for plan in plans)  # type: ignore[arg-type]
    assert few.total is not None
    assert many.total is not None
    assert 10 < many.total / few.total < 100
    assert "timed just now" in few.basis
    shutil.rmtree(tmp_path / "text")
    gone = estimate(plans[0].runs, plans[0].runs, Clock())  # type: ignore[arg-type]
    assert gone.total is None
    assert re.fullmatch(r"ConvAttention, ReBased could not be timed \(data.folder \S+ does not exist; .*\)", gone.basis)
