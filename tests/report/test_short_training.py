"""Runs that ended too early are found by their learning curves, and the page says so before it ranks."""

from typing import Any

import pytest

from fake_records import fake_run
from rebased.report.report import Report
from rebased.report.synthetic.confounds import is_improving, left_plateau_late, warn_about_short_training
from rebased.runs.collect import Collection
from rebased.runs.finished import Run

RISING = [0.05, 0.05, 0.06, 0.08, 0.15, 0.30]  # cut off while it rises
LATE = [0.05, 0.05, 0.05, 0.05, 0.28, 0.54, 0.55, 0.55]  # rises late, then is flat
FLAT = [0.30, 0.60, 0.75, 0.80, 0.81, 0.80, 0.81, 0.81]
SOLVED = [0.05, 0.05, 0.05, 0.05, 0.10, 0.995]


@pytest.mark.parametrize(
    ("curve", "improving", "late"), [(RISING, True, True), (LATE, False, True), (FLAT, False, False)]
)
def test_curves(curve: list[float], improving: bool, late: bool) -> None:
    assert is_improving(curve) == improving
    assert left_plateau_late(curve, 0.04) == late


def run(model: str, curve: list[float], **more: Any) -> Run:
    return fake_run(model, curve, changes={"train": {"epochs": len(curve)}}, **more)


def test_solved_tasks_and_gaps_are_not_judged() -> None:
    assert warn_about_short_training([("a", run("rebased", SOLVED)), ("b", run("rebased", FLAT))]) is None
    torn = run("rebased", RISING)
    del torn.lines[2]
    assert warn_about_short_training([("a", torn)]) is None
    said = warn_about_short_training([("a", run("rebased", RISING)), ("a", run("rebased", FLAT, seed=43))])
    assert said is not None
    assert said.startswith("Perhaps trained too short: 1 of 2 runs. 1 still improved")
    assert ", 1 left the plateau late" in said
    assert said.endswith("left the plateau late: a 1 of 2.")


def test_the_page_begins_with_it() -> None:
    runs = [run(model, curve, seed=seed) for model, curve in (("rebased", RISING), ("based", FLAT)) for seed in (1, 2)]
    report = Report(Collection(runs=runs))
    assert report.summary[0].startswith("Perhaps trained too short: 2 of 4 runs. 2 still improved at the end")
    assert report.summary[0].endswith("left the plateau late: ReBased 2 of 2.")
    fine = Report(Collection(runs=[one for one in runs if one.model == "Based"]))
    assert not any("too short" in sentence for sentence in fine.summary)
    assert "too short" not in fine.page(None, "").to_html()
