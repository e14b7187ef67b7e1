"""benchmarks/sweep_hours.py: hours from recorded steps."""

from pathlib import Path

import pytest
from benchmarks import sweep_hours

from rebased.runs.shipped import find_config
from rebased.train.sweep import read_sweep


def test_a_line_through_steps() -> None:
    rows = [{"T": T, "D": D, "ms": 512 * T * (20 + D / 4) / 1e6} for T, D in ((256, 64), (512, 128), (2048, 512))]
    slower = [{**row, "ms": 2 * row["ms"]} for row in rows]
    ns = sweep_hours.token_line([*slower, *rows])
    assert [ns(D) for D in (0, 64, 1024)] == pytest.approx([20, 36, 276])


def test_a_run_costs_its_tokens() -> None:
    file = find_config("table1-small", "sweep")
    runs = {sweep_hours.preset_of(point.config.model): point.config for point in read_sweep(file, {})}
    steps = {("rebased", 256): 4.0, ("based", 256): 2.0, ("rebased", 2048): 30.0, ("based", 2048): 60.0}
    hours = {name: sweep_hours.run_hours(run, lambda D: 36.0, steps) for name, run in runs.items()}
    tokens = 12 * 256 * (100_000 + 6000 / 3)
    assert hours == pytest.approx({"rebased": tokens * 36e-9 / 3600, "based": tokens * 18e-9 / 3600})


def test_records_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="has section targets with"):
        sweep_hours.main(results=tmp_path)
