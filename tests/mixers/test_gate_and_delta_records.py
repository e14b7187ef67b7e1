"""The table of docs/mixers.md is that of the records in results/mixers/gate-and-delta."""

from pathlib import Path
from statistics import mean

from rebased.runs.collect import collect

ROOT = Path(__file__).parents[2]


def test_the_page_shows_the_records() -> None:
    runs = collect([ROOT / "results/mixers/gate-and-delta/gate-and-delta.jsonl.gz"]).runs
    page = (ROOT / "docs" / "mixers.md").read_text()
    for mixer in ("rebased", "gated_rebased", "delta_rebased"):
        own = [run for run in runs if run.settings["model"]["mixers"][-1]["name"] == mixer]
        by_rate = [mean(run.held_out or 0 for run in own if run.lr == lr) for lr in (1e-3, 3e-3, 1e-2)]
        solved = sum(run.best.accuracy > 0.99 for run in own)
        cells = [*by_rate, mean(run.held_out or 0 for run in own)]
        row = " | ".join([f"`{mixer}`", *(f"{accuracy:.3f}" for accuracy in cells), f"{solved} of {len(own)}"])
        assert f"| {row} |" in page
