"""From runs to results: the rate that stands for a model, both ways of reporting, and runs that went wrong."""

import re
from math import isnan

import pytest

from fake_records import fake_run
from rebased.report.report import Report
from rebased.report.synthetic.cells import build_results
from rebased.runs.collect import Collection


def test_the_rate_is_chosen_by_the_mean_over_seeds_on_the_test_split() -> None:
    runs = [
        fake_run(accuracies=[0.9, 0.1], held_out=[0.2, 0.9], lr=1e-2, seed=42),
        fake_run(accuracies=[0.1, 0.2], held_out=[0.9, 0.9], lr=1e-2, seed=43),
        fake_run(accuracies=[0.7, 0.6], held_out=[0.5, 0.1], lr=1e-3, seed=42),
        fake_run(accuracies=[0.5, 0.7], held_out=[0.0, 0.7], lr=1e-3, seed=43),
    ]
    (cell,) = build_results(runs).cells
    assert cell.choice.lr == 1e-3
    assert cell.test.mean == pytest.approx(0.7)
    assert cell.held_out is not None
    assert cell.held_out.mean == pytest.approx((0.5 + 0.7) / 2)  # of the epochs that were best on the test split
    assert cell.accuracies(held_out=True) == {42: 0.5, 43: 0.7}
    assert cell.lr_means == pytest.approx([0.7, 0.55])


def test_without_a_held_out_split() -> None:
    (cell,) = build_results([fake_run()]).cells
    assert cell.held_out is None
    assert isnan(cell.test.sd)


def test_a_diverged_run_counts_with_its_best_or_with_nothing() -> None:
    runs = [
        fake_run(accuracies=[0.6, 0.1], status="diverged", seed=42),
        fake_run(accuracies=[], status="diverged", seed=43),
    ]
    (cell,) = build_results(runs).cells
    assert cell.accuracies(held_out=False) == {42: 0.6, 43: 0.0}
    assert cell.slices("by_pairs") == {4: 0.3}


@pytest.mark.parametrize("status", [None, "failed"])
def test_a_run_without_a_result_counts_nowhere(status: str | None) -> None:
    assert [len(cell.chosen) for cell in build_results([fake_run(), fake_run(seed=43, status=status)]).cells] == [1]
    message = re.escape(f"no run has a result (1 {status or 'unfinished'})")
    with pytest.raises(ValueError, match=message):
        build_results([fake_run(status=status)])


def test_runs_without_a_readable_epoch_are_said_to_be_damaged() -> None:
    found = Collection(runs=[fake_run(accuracies=[])], damaged_lines=2, damaged_files=["runs/a.jsonl.gz"])
    with pytest.raises(ValueError, match=r"no run has a result \(1 damaged\)\n2 damaged lines skipped, in runs/a"):
        Report(found)


def test_a_run_on_two_devices_is_one_result() -> None:
    runs = [fake_run(), fake_run(changes={"train": {"device": "cpu"}})]
    for order in (runs, runs[::-1]):
        results = build_results(order)
        assert (len(results.cells), results.repeated) == (1, 1)
        assert results.cells[0].any_run.digest == min(run.digest for run in runs)


def test_order() -> None:
    heads = [fake_run(changes={"model": {"mixers": {1: {"n_heads": n}}}}) for n in (12, 2)]
    results = build_results([fake_run("mamba"), *heads, fake_run("based", seq_len=64), fake_run("based")])
    assert results.tasks == ["T = 32, 4 pairs", "T = 64, 4 pairs"]
    assert list(map(str, results.models)) == ["Based", "ReBased (n_heads 2)", "ReBased (n_heads 12)", "Mamba"]


def test_no_seed_has_a_say_in_its_own_rate() -> None:
    """Seed 42 is lucky at 1e-2. The mean over all seeds picks that rate; for seed 42 the others pick 1e-3."""
    levels = {1e-2: (0.9, 0.3, 0.3), 1e-3: (0.4, 0.4, 0.4)}
    runs = [
        fake_run(accuracies=[level], seed=seed, lr=lr)
        for lr, values in levels.items()
        for seed, level in zip((42, 43, 44), values, strict=True)
    ]
    (cell,) = build_results(runs).cells
    assert cell.accuracies(held_out=False) == {42: 0.9, 43: 0.3, 44: 0.3}
    assert cell.unselected(held_out=False) == {42: 0.4, 43: 0.3, 44: 0.3}


def test_of_a_search_in_stages_the_seeds_count_on_which_nothing_was_chosen() -> None:
    runs = [fake_run(accuracies=[0.1], seed=42, lr=1e-3)]
    runs += [fake_run(accuracies=[level], seed=seed, lr=1e-2) for seed, level in ((42, 0.9), (43, 0.5), (44, 0.6))]
    (cell,) = build_results(runs).cells
    assert cell.unselected(held_out=False) == {43: 0.5, 44: 0.6}
    (two,) = build_results(runs[:3]).cells
    assert two.unselected(held_out=False) == {42: 0.9, 43: 0.5}  # one seed alone could be put to no test
