"""Runs that were not made alike are never averaged in silence: they have names of their own, or the page warns."""

from typing import Any

from fake_records import fake_run
from rebased.report.synthetic.page import SyntheticReport
from rebased.runs.collect import Collection
from rebased.runs.finished import Run

SEEDS = (42, 43)


def runs(model: str = "rebased", d_model: int = 24, **train: Any) -> list[Run]:
    return [fake_run(model, d_model=d_model, seed=seed, changes={"train": train}) for seed in SEEDS]


def cells(report: SyntheticReport) -> dict[tuple[str, int], int]:
    return {(str(cell.model), cell.d_model): cell.test.n for cell in report.results.cells}


def test_in_one_place_precision_and_epochs_make_names() -> None:
    for setting, usual, other in (("precision", "fp32", "bf16"), ("epochs", 5, 9)):
        report = SyntheticReport(Collection(runs=[*runs(), *runs(**{setting: other})]))
        assert cells(report) == {(f"ReBased ({setting} {usual})", 24): 2, (f"ReBased ({setting} {other})", 24): 2}
        assert report.warnings == []


def test_models_that_were_trained_differently() -> None:
    report = SyntheticReport(Collection(runs=[*runs(), *runs("based", precision="tf32", epochs=9)]))
    assert report.warnings == [
        "Compared runs were not all trained with the same settings, which may cause differences: epochs 9 (2 runs), "
        "5 (2 runs); precision tf32 (2 runs), fp32 (2 runs)."
    ]


def test_a_name_that_some_models_lack_tells_nothing() -> None:
    report = SyntheticReport(Collection(runs=[*runs(), *runs(precision="bf16"), *runs("based")]))
    assert [str(model) for model in report.results.models] == [
        "Based",
        "ReBased (precision bf16)",
        "ReBased (precision fp32)",
    ]
    assert report.warnings == [
        "Compared runs were not all trained with the same settings, which may cause differences: precision fp32 "
        "(4 runs), bf16 (2 runs)."
    ]


def test_widths_that_were_trained_differently() -> None:
    report = SyntheticReport(Collection(runs=[*runs(), *runs(d_model=48, precision="tf32")]))
    assert report.warnings == [
        "Compared runs were not all trained with the same settings, which may cause differences: precision fp32 "
        "(2 runs), tf32 (2 runs)."
    ]


def test_tasks_are_not_set_side_by_side() -> None:
    report = SyntheticReport(
        Collection(runs=[*runs(), *(fake_run(seq_len=64, seed=s, changes={"train": {"epochs": 9}}) for s in SEEDS)])
    )
    assert report.warnings == []


def test_how_a_cell_was_computed() -> None:
    other = [fake_run(seed=seed, changes={"train": {"micro_batch": 4}}) for seed in (43, 44)]
    report = SyntheticReport(Collection(runs=[*runs(), *other]))
    assert cells(report) == {("ReBased", 24): 3}
    assert report.warnings == [
        "1 run left out: the same as another except for execution settings (device, micro_batch, ...). That with "
        "the first digest counts.",
        "Runs of one cell have different execution settings, which should not change their results: micro_batch none "
        "(2 runs), 4 (1 run).",
    ]
