"""The order of a sweep's work: breadth first, in stages, and within a given time."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from rebased.cli.sweep_board import Tally, describe_plan
from rebased.runs.finished import Run
from rebased.train.executors.local import LocalExecutor
from rebased.train.kinds import workload_of
from rebased.train.sweep.cost import Estimate
from rebased.train.sweep.grid import Select, load_sweep
from rebased.train.sweep.plan import Plan, PlannedRun, make_plan
from rebased.train.sweep.queue import SweepQueue, TimeBudget, order_of_work
from rebased.train.sweep.stages import Stages
from tiny_run import TINY

GRID: dict[str, Any] = {
    "train.seed": [7, 5, 6],
    "train.lr": [0.01, 0.001],
    "model.d_model": [8, 16],
    "model.mixers": [["short_conv", "attention"], ["attention", "attention"]],
}


def plan_of(tmp_path: Path, grid: Any = GRID, known: dict[str, Run] | None = None, **more: Any) -> Plan:
    path = tmp_path / "sweep.yaml"
    path.write_text(yaml.safe_dump({"base": TINY, "grid": grid, **more}))
    return make_plan(load_sweep(path, {}).points, tmp_path / "runs", {}, known)


def facts(run: PlannedRun) -> tuple[Any, ...]:
    train, model = run.config.train, run.config.model
    return train.seed, model.d_model, train.lr, model.mixers[0].name


def test_all_models_of_a_place_come_first_then_all_places_with_the_first_seed(tmp_path: Path) -> None:
    order = [facts(run) for run in order_of_work(plan_of(tmp_path).runs)]
    models = ("short_conv", "attention")
    assert order == [
        (seed, width, lr, model) for seed in (7, 5, 6) for width in (8, 16) for lr in (0.01, 0.001) for model in models
    ]


def test_runs_that_have_begun_come_first(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    last = order_of_work(plan.runs)[-1]
    (last.folder).mkdir(parents=True)
    (last.folder / "checkpoint.json").touch()
    assert order_of_work(plan_of(tmp_path).runs)[0].digest == last.digest


def test_what_is_left_keeps_the_order_of_the_whole_grid(tmp_path: Path) -> None:
    """The first run that is left has the second seed and the second rate, which still come second."""
    plan = plan_of(tmp_path, {"model.d_model": [8, 16], "train.seed": [7, 5], "train.lr": [0.01, 0.001]})
    whole = order_of_work(plan.runs)
    left = [run for run in plan.runs if run.config.model.d_model == 16 or facts(run)[::2] == (5, 0.001)]
    queue = SweepQueue(left, None, None, plan.runs)
    assert [facts(run) for run in queue.runs] == [facts(run) for run in whole if run in left]
    assert facts(queue.runs[0]) == (7, 16, 0.01, "short_conv")


def ended(run: PlannedRun, accuracy: float, epochs: int = 3, seconds: float = 1.0) -> list[dict[str, Any]]:
    """The record of a run that has ended with this accuracy."""
    line = {"type": "epoch", "test": {"accuracy": accuracy}, "seconds": seconds, "test_seconds": 0.0}
    start = {"type": "run", "digest": run.digest, "config": run.config.model_dump(mode="json")}
    return [start, *(line | {"epoch": n + 1} for n in range(epochs)), {"type": "end", "status": "done"}]


def take_all(queue: SweepQueue, accuracies: dict[float, float]) -> list[tuple[int, float]]:
    """(seed, lr) in the order in which one worker would train them, with accuracies by learning rate."""
    taken = []
    while (index := queue.next()) is not None:
        run = queue.runs[index]
        taken.append((run.config.train.seed, run.config.train.lr))
        queue.ended(run, "done", ended(run, accuracies[run.config.train.lr]))
    return taken


RATES = {"train.lr": [0.01, 0.001], "train.seed": [1, 2, 3]}


@pytest.mark.parametrize("others", ["skip", "last"])
def test_the_best_value_gets_the_other_seeds(tmp_path: Path, others: Any) -> None:
    plan = plan_of(tmp_path, RATES)
    queue = SweepQueue(plan.runs, Stages(Select(seeds=1, others=others), plan.runs))
    taken = take_all(queue, {0.01: 0.2, 0.001: 0.6})
    assert taken[:4] == [(1, 0.01), (1, 0.001), (2, 0.001), (3, 0.001)]
    assert taken[4:] == ([] if others == "skip" else [(2, 0.01), (3, 0.01)])
    assert [run.config.train.lr for run in queue.left_out] == ([0.01, 0.01] if others == "skip" else [])
    assert queue.not_begun == []


@pytest.mark.parametrize(("others", "count"), [("skip", 2), ("last", 4)])
def test_runs_that_stages_leave_out_are_not_to_train(tmp_path: Path, others: Any, count: int) -> None:
    plan = plan_of(tmp_path, RATES)
    stages = Stages(Select(seeds=1, others=others), plan.runs)
    tried = [run for run in plan.runs if run.config.train.seed == 1]
    for run in tried:
        stages.ended(run.digest, run.config.train.lr)
    left = [run for run in plan.runs if run not in tried]
    said = next(describe_plan(plan, left, Estimate({}, 5.0, "as timed", {}), LocalExecutor(1), False, stages))
    assert f"{count} to train" in said


def test_counts_and_the_bar_leave_out_what_a_choice_will_leave_out(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, RATES)  # two rates and three seeds: two runs choose, then two of four are trained
    stages = Stages(Select(seeds=1), plan.runs)
    cost = Estimate(dict.fromkeys([run.digest for run in plan.runs], 10.0), 40.0, "as timed")
    tally = Tally(plan, cost, 1, stages)
    assert "6 runs: 0 done, 4 to train" in next(describe_plan(plan, plan.runs, cost, LocalExecutor(1), False, stages))
    assert (tally.summary(), tally.share_done()) == ("0 of 4 runs done", 0.0)
    for run in (run for run in plan.runs if run.config.train.seed == 1):
        stages.ended(run.digest, run.config.train.lr)
        tally.ended(replace(run, status="done"), 0.5)
    assert (tally.summary(), tally.share_done()) == ("2 of 4 runs done", 0.5)


def test_a_choice_waits_for_all_its_runs_and_a_failed_one_does_not_count(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, RATES)
    stages = Stages(Select(seeds=1), plan.runs)
    queue = SweepQueue(plan.runs, stages)
    first, second = (queue.runs[index] for index in (queue.next(), queue.next()) if index is not None)
    assert queue.next() is None
    queue.ended(first, "done", ended(first, 0.1))
    assert (queue.next(), len(queue.not_begun), queue.left_out) == (None, 4, [])
    queue.ended(second, "failed", [])
    assert {stages.role(run) for run in queue.not_begun} == {"chosen"}
    assert len(queue.left_out) == 2


def test_what_is_known_chooses_too(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, RATES)
    first = [run for run in plan.runs if run.config.train.seed == 1]
    known = {run.digest: Run("x", ended(run, 1 - run.config.train.lr)) for run in first}
    plan = plan_of(tmp_path, RATES, known)
    assert [run.status for run in plan.runs].count("done") == 2
    assert all(run.known for run in plan.runs if run.status == "done")
    queue = SweepQueue(plan.to_do(False), Stages(Select(seeds=1), plan.runs))
    assert take_all(queue, {0.001: 0.5}) == [(2, 0.001), (3, 0.001)]


def test_cells_are_chosen_one_by_one_and_may_have_one_value(tmp_path: Path) -> None:
    grids = [RATES | {"model.d_model": [8]}, {"model.d_model": [16], "train.lr": [0.02], "train.seed": [1, 2, 3]}]
    plan = plan_of(tmp_path, grids)
    assert len(plan.runs) == 9
    stages = Stages(Select(seeds=2), plan.runs)
    assert [stages.role(run) for run in plan.runs] == [*["first", "first", "waiting"] * 2, *["chosen"] * 3]
    assert stages.share(plan.runs[2]) == 0.5


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def budget_of(
    plan: Plan, total: float, seconds: Sequence[float], clock: Clock, share: float = 1, **more: Any
) -> TimeBudget:
    """A budget for runs that are expected to do this share of their work before they stop early."""
    costs = {run.digest: one for run, one in zip(plan.runs, seconds, strict=True)}
    cost = Estimate(
        costs, 0.0, "", {run.digest: share * workload_of(run.config).run_work(run.config) for run in plan.runs}
    )
    return TimeBudget(total, cost, now=clock, **{"may_break_off": False} | more)


def test_a_run_that_does_not_fit_is_not_started_but_a_shorter_one_is(tmp_path: Path) -> None:
    plan, clock = plan_of(tmp_path, {"train.seed": [1, 2, 3]}), Clock()
    queue = SweepQueue(plan.runs, None, budget_of(plan, 100, [60, 60, 20], clock))
    assert queue.next() == 0
    clock.seconds += 50  # 40 s are left until runs are saved, 10 s before the end
    assert queue.next() == 2
    assert (queue.next(), queue.is_time_up()) == (None, False)
    clock.seconds += 40
    assert queue.is_time_up()
    assert [run.config.train.seed for run in queue.not_begun] == [2]


def test_with_a_file_for_unfinished_runs_any_run_may_start(tmp_path: Path) -> None:
    plan, clock = plan_of(tmp_path, {"train.seed": [1]}), Clock()
    assert SweepQueue(plan.runs, None, budget_of(plan, 10, [600], clock)).next() is None
    assert SweepQueue(plan.runs, None, budget_of(plan, 10, [600], clock, may_break_off=True)).next() == 0


def test_estimates_are_corrected_by_the_work_that_was_done(tmp_path: Path) -> None:
    plan, clock = plan_of(tmp_path, {"train.seed": [1, 2]}), Clock()
    budget = budget_of(plan, 400, [100, 100], clock)
    first, second = plan.runs
    budget.began(first)
    clock.seconds += 100  # it did a third of its epochs, so it was three times as slow as expected
    budget.ended(first, ended(first, 1.0, epochs=1))
    clock.seconds += 30
    assert budget.left == 250
    assert not budget.fits(second)
    clock.seconds -= 60
    assert budget.fits(second)


def test_a_run_that_stops_early_as_expected_was_not_slow(tmp_path: Path) -> None:
    plan, clock = plan_of(tmp_path, {"train.seed": [1, 2]}), Clock()
    budget = budget_of(plan, 400, [100, 100], clock, share=1 / 3)
    budget.began(plan.runs[0])
    clock.seconds += 100
    budget.ended(plan.runs[0], ended(plan.runs[0], 1.0, epochs=1))
    clock.seconds += 170
    assert budget.left == 110
    assert budget.fits(plan.runs[1])


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"select": {"setting": "train.lrr"}}, "select.setting 'train.lrr' should be a setting .* mean 'train.lr'"),
        ({"select": {"setting": "train.seed"}}, "should be a setting that the grid gives several values"),
        ({"select": {"setting": "train.epochs"}}, "select.setting 'train.epochs' should be a setting that the grid"),
        (
            {"select": {"seeds": 9}},
            r"select.seeds 9 is more than the 3 seeds of the grid; give it more seeds, or --select.seeds 3",
        ),
        ({"select": {True: "train.lr"}}, "unknown key True; known: setting, seeds, others"),
        ({"select": {"seeds": 0}}, "select.seeds"),
    ],
)
def test_bad_stages_are_named(tmp_path: Path, more: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_of(tmp_path, RATES, **more)


def test_stages_choose_settings_of_configs_alone(tmp_path: Path) -> None:
    """A preset is in no config, and an axis may change the setting from above."""
    select = {"setting": "model.preset", "seeds": 1}
    with pytest.raises(ValueError, match=r"select.setting 'model.preset' should be a setting"):
        plan_of(tmp_path, {"model.preset": ["rebased", "based"], "train.seed": [1, 2]}, select=select)
    mixers = [[{"name": "rebased", "n_heads": n}] for n in (1, 2)]
    select["setting"] = "model.mixers.0.n_heads"
    plan_of(tmp_path, {"model.mixers": mixers, "train.seed": [1, 2]}, select=select)


def test_an_axis_of_several_grids_is_replaced_where_it_is(tmp_path: Path) -> None:
    path = tmp_path / "sweep.yaml"
    grids = [{"train.seed": [1, 2]}, {"train.seed": [1, 2], "train.lr": [0.5]}]
    path.write_text(yaml.safe_dump({"base": TINY, "grid": grids}))
    points = load_sweep(path, {"grid.train.seed": "[9]", "grid.train.lr": "[0.25, 0.125]"}).points
    assert [(point.config.train.seed, point.config.train.lr) for point in points] == [(9, 0.01), (9, 0.25), (9, 0.125)]
    with pytest.raises(ValueError, match=r"the grid has no axis 'train\.eps'"):
        load_sweep(path, {"grid.train.eps": "[1]"})
