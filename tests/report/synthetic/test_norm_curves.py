"""The section on gamma and beta: lines by length, and no section without such records."""

import math
from typing import Any

import pytest
import torch

from fake_records import fake_run
from page_reader import assert_self_contained
from rebased.report.report import Report
from rebased.report.synthetic.cells import build_results
from rebased.report.synthetic.norms import cells_with_norms, curves, decayed
from rebased.runs.collect import Collection
from rebased.runs.finished import Run


def with_norms(run: Run, means: list[float]) -> Run:
    def entry(mean: float) -> dict[str, Any]:
        return {"mean": mean, "sd": 0.5, "low": 0.0, "high": 1.0, "counts": [1, 2, 3]}

    lines = iter(means)
    changed = [
        line | {"norms": {"1": {"q.gamma": entry(next(lines)), "k.beta": entry(0.0)}}}
        if line["type"] == "epoch"
        else line
        for line in run.lines
    ]
    return Run(run.folder, changed)


def test_one_line_per_seed_by_length() -> None:
    runs = [with_norms(fake_run(seed=seed), [0.8, 0.2 + seed / 100]) for seed in (42, 44)]
    runs.append(with_norms(fake_run(seq_len=64), [0.9, 0.3]))
    results = build_results(runs)
    (cells,) = cells_with_norms(results).values()
    assert [cell.task for cell in cells] == ["T = 32, 4 pairs", "T = 64, 4 pairs"]
    one, other = curves(cells[0])["q.gamma"]
    assert (one.epochs, one.sds) == ([0, 1, 2], [0.0, 0.5, 0.5])
    assert (one.means, other.means) == ([1.0, 0.8, 0.62], [1.0, 0.8, 0.64])
    page = Report(Collection(runs=runs)).page(None, "rebased report")
    assert "Gamma and beta of queries and keys" in " ".join(assert_self_contained(page.to_html()).texts["h2"])


def test_a_run_that_ends_early_has_a_shorter_line() -> None:
    """Its last epoch may be one that the record of the other does not hold."""
    short = with_norms(fake_run(seed=42, accuracies=(0.1,) * 3), [0.9, 0.8, 0.7])
    long = with_norms(fake_run(seed=43, accuracies=(0.1,) * 4), [0.9, 0.8, 0.7, 0.6])
    compact = Run(long.folder, [line for line in long.lines if line.get("epoch") != 3])
    (cells,) = cells_with_norms(build_results([short, compact])).values()
    assert [curve.epochs for curve in curves(cells[0])["q.gamma"]] == [[0, 1, 2, 3], [0, 1, 2, 4]]


def test_old_records_have_no_such_section() -> None:
    assert cells_with_norms(build_results([fake_run()])) == {}
    html = Report(Collection(runs=[fake_run()])).page(None, "rebased report").to_html()
    assert "Gamma and beta" not in html


def test_weight_decay_alone_is_what_adamw_leaves_without_gradients() -> None:
    run = fake_run(accuracies=(0.1, 0.2, 0.3), lr=3e-3)  # three of five epochs
    run.epochs[-1] |= {"step": 12}
    parameter = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
    optimiser = torch.optim.AdamW([parameter], lr=3e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, T_max=5)
    for _ in range(3):
        for _ in range(4):
            parameter.grad = torch.zeros_like(parameter)
            optimiser.step()
        schedule.step()
    assert decayed(run, 3) == pytest.approx(parameter.item(), rel=1e-12)
    assert decayed(run, 0) == 1
    assert math.isnan(decayed(fake_run(), 2))  # an old record does not have the number of steps


@pytest.mark.parametrize("change", [{"lr": 1e300}, {"lr": 1000.0}, {"epochs": 0}])
def test_numbers_of_a_stranger_do_not_end_a_report(change: dict[str, Any]) -> None:
    """They are too large, give a complex number, or divide by zero."""
    run = fake_run(accuracies=(0.1, 0.2, 0.3))
    run.epochs[-1] |= {"step": 400}
    run.lines[0]["config"]["train"] |= change
    assert math.isnan(decayed(run, 3))
