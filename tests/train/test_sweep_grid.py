"""Sweep files: the points of a grid, and the errors for an invalid grid."""

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from rebased.config import merge
from rebased.runs.shipped import CONFIGS, find_config
from rebased.tasks.mqar import PAIRS_BY_LENGTH
from rebased.train.sweep.grid import from_python, load_sweep
from rebased.train.sweep.plan import Plan, make_plan
from tiny_run import TINY, tiny

ROOT = Path(__file__).parents[2]


def write(folder: Path, grid: Any, **more: Any) -> Path:
    path = folder / "sweep.yaml"
    path.write_text(yaml.safe_dump({"base": TINY, "grid": grid, **more}))
    return path


def test_every_combination_is_a_run(tmp_path: Path) -> None:
    path = write(tmp_path, {"train.lr": [0.1, 0.2], "train.seed": [1, 2, 3]})
    points = load_sweep(path, {}).points
    assert [point.config for point in points] == [
        tiny({"train": {"lr": lr, "seed": seed}}) for lr in (0.1, 0.2) for seed in (1, 2, 3)
    ]
    assert str(points[1]) == "train.lr=0.1, train.seed=2"


def test_lists_of_a_named_axis_go_together(tmp_path: Path) -> None:
    axis = {"task.train.0.seq_len": [12, 16], "task.train.0.kv_pairs": [2, 4], "task.test.1.seq_len": [16, 20]}
    configs = [point.config for point in load_sweep(write(tmp_path, {"length": axis, "train.seed": [1, 2]}), {}).points]
    sizes = [(c.task.train[0].seq_len, c.task.train[0].kv_pairs, c.task.test[1].seq_len) for c in configs]
    assert sizes == [(12, 2, 16), (12, 2, 16), (16, 4, 20), (16, 4, 20)]
    assert [config.model.max_len for config in configs] == [
        16,
        16,
        20,
        20,
    ]  # defaults that depend on a setting change with it


def test_entries_of_a_named_axis_set_what_each_needs(tmp_path: Path) -> None:
    base = {**TINY, "model": {"d_model": 24}}
    entries = [{"model.preset": "rebased"}, {"model.preset": "mamba", "train.micro_batch": 4}, {}]
    grid = {"model": entries, "model.d_model": [12, 24]}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(base))
    path = write(tmp_path, grid)
    path.write_text(yaml.safe_dump({"base": "run.yaml", "grid": grid}))  # the file of a run, next to that of the sweep
    configs = [point.config for point in load_sweep(path, {}).points]
    assert [config.model.mixers[0].name for config in configs] == ["short_conv"] * 2 + ["mamba"] * 2 + [
        "short_conv"
    ] * 2
    assert [config.train.micro_batch for config in configs] == [None, None, 4, 4, None, None]
    assert [config.model.d_model for config in configs] == [12, 24] * 3


def test_overrides_reach_every_run_and_replace_an_axis(tmp_path: Path) -> None:
    path = write(tmp_path, {"train.lr": [0.1, 0.2], "train.seed": [1, 2, 3]})
    points = load_sweep(path, {"train.epochs": "7", "grid.train.seed": "[9]", "grid.model.d_model": "[4, 8]"}).points
    assert [(p.config.train.epochs, p.config.train.seed) for p in points] == [(7, 9)] * 4
    assert {p.config.model.d_model for p in points} == {4, 8}


def test_points_that_are_one_run_are_trained_once(tmp_path: Path) -> None:
    path = write(tmp_path, {"train.lr": [0.1, 0.2, 0.1], "train.seed": [1, 2]})
    points = load_sweep(path, {"train.seed": "5"}).points
    plan = make_plan(points, tmp_path / "out", {})
    assert len(points) == 6
    assert (len(plan.runs), plan.merged) == (2, 4)
    assert [run.folder for run in plan.runs] == [
        tmp_path / "out" / tiny({"train": {"lr": lr, "seed": 5}}).digest() for lr in (0.1, 0.2)
    ]


def test_configs_of_a_python_file(tmp_path: Path) -> None:
    points = from_python(Path("mine.py"), [tiny(), TINY | {"train": {"seed": 7}}], {"train.epochs": "9"})
    assert [point.config.train.epochs for point in points] == [9, 9]
    assert points[0].config == tiny({"train": {"epochs": 9}})
    assert points[1].config.train.seed == 7
    for configs, message in (
        ([], "mine.py: `configs` should be a list"),
        ({"a": 1}, "mine.py: `configs` should be a list"),
        ([tiny(), TINY | {"trian": {}}], r"mine.py: configs\[1\]: unknown key 'trian'; did you mean 'train'\?"),
        ([3], r"mine.py: configs\[0\] should be a RunConfig, or a mapping as in its YAML; got 3"),
        ([merge(TINY, {"model": {"d_model": 9}})], r"mine.py: configs\[0\]: d_model 9 is not divisible by n_heads 2"),
    ):
        with pytest.raises(ValueError, match=message):
            from_python(Path("mine.py"), configs, {})
    with pytest.raises(ValueError, match="is a Python file and has no grid"):
        from_python(Path("mine.py"), [tiny()], {"grid.train.seed": "[1]"})


def test_the_example_of_the_guide(tmp_path: Path) -> None:
    (example,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "sweeps.md").read_text(), flags=re.DOTALL)
    (tmp_path / "sweep.yaml").write_text(example)
    configs = [point.config for point in load_sweep(tmp_path / "sweep.yaml", {}).points]
    assert len(configs) == 2 * 2 * 2 * 2
    assert {(config.model.d_model, config.train.micro_batch) for config in configs} == {(64, None), (512, 128)}


BAD: list[tuple[Any, str]] = [
    ({"base": TINY, "gird": {}}, "unknown key 'gird'; did you mean 'grid'?"),
    ({"base": TINY}, "grid: is missing"),
    ({"base": TINY, "grid": {}}, "grid is empty; give it an axis, such as train.seed: [42, 43]"),
    ({"base": TINY, "grid": {"train.lr": []}}, "grid.train.lr is empty"),
    ({"base": TINY, "grid": {"both": {"train.lr": [], "train.seed": []}}}, "grid.both is empty"),
    (
        {"base": TINY, "grid": {"train.lr": 0.1}},
        "grid.train.lr should be a list of values of that setting, [0.1]; got 0.1",
    ),
    ({"base": TINY, "grid": {"both": {"train.lr": 0.1}}}, "grid.both is not the path of a setting"),
    ({"base": TINY, "grid": {"both": 3}}, "grid.both is not the path of a setting"),
    ({"base": TINY, "grid": {"both": [{5: 0.1}]}}, "grid.both: 5 is not the path of a setting, such as train.lr"),
    ({"base": TINY, "grid": [1]}, "grid: should be a valid dictionary; got [1]"),
    (
        TINY,
        "task is at the top level, so this is the config of one run; train it with `rebased train`, or put it",
    ),
    ({"base": TINY, "grid": {"train.lrr": [1, 2]}}, "train: unknown key 'lrr'; did you mean 'lr'? (in every run"),
    ({"base": TINY, "grid": {"trian.lr": [1]}}, "unknown key 'trian'; did you mean 'train'? (in every run"),
    ({"base": TINY, "grid": {"lr": [1, 2]}}, "grid.lr is not the path of a setting (such as train.lr)"),
    (
        {"base": TINY, "grid": {"train.lr": [0.1, -1], "train.seed": [1, 2]}},
        "grid point train.lr=-1, train.seed=1 and 1 more: train.lr: should be greater than 0; got -1",
    ),
    (
        {"base": TINY, "grid": {"model.d_model": [8, 9]}},
        "grid point model.d_model=9: d_model 9 is not divisible by n_heads 2",
    ),
    (
        {"base": TINY, "grid": {"task.train.0.seq_len": [12, 13]}},
        "grid point task.train.0.seq_len=13: task: train[0]: seq_len must be even, got 13",
    ),
    (
        {"base": TINY, "grid": {"both": {"train.lr": [0.1, 0.2], "train.seed": [1]}}},
        "grid.both: its lists are used together, so they must be equally long: train.lr has 2, train.seed has 1",
    ),
    ({"base": TINY, "grid": {"train.lr": {"a": [1]}}}, "grid.train.lr should be a list of values of that setting"),
    ({"base": "nowhere.yaml", "grid": {"train.lr": [1]}}, "nowhere.yaml"),
]


@pytest.mark.parametrize(("tree", "message"), BAD)
def test_bad_files_are_named_with_their_remedy(tmp_path: Path, tree: Any, message: str) -> None:
    path = tmp_path / "sweep.yaml"
    path.write_text(yaml.safe_dump(tree))
    with pytest.raises((ValueError, OSError)) as caught:
        load_sweep(path, {})
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_an_axis_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--grid\.lenght: the grid has no axis 'lenght'; did you mean 'length'\?"):
        load_sweep(write(tmp_path, {"length": [{"train.lr": 1}]}), {"grid.lenght": "[]"})


RUNS = {"figure1": 2000, "figure7": 1600, "table1": 960, "heads": 1440, "extrapolation": 200, "table3": 280}
RUNS |= {"kernels": 1040}


@cache
def plan_of(name: str) -> Plan:
    """The plan of a shipped sweep before anything is trained."""
    return make_plan(load_sweep(find_config(name, "sweep"), {}).points, Path("nothing is here"), {})


@pytest.mark.parametrize("size", ["", "-small", "-cpu"])
@pytest.mark.parametrize("name", RUNS)  # all sizes of one follow each other: they share its plan
def test_every_shipped_sweep_is_planned(name: str, size: str) -> None:
    plan = plan_of(f"{name}{size}")
    configs = [run.config for run in plan.runs]
    assert plan.merged == 0
    assert all(config.task.held_out for config in configs)  # so that the held-out numbers exist
    if not size:
        assert len(configs) == RUNS[name]
        assert {config.train.seed for config in configs} == {42, 43, 44, 45, 46}
        assert {config.train.lr for config in configs} == {5e-4, 1e-3, 3e-3, 1e-2}
        assert {config.train.epochs for config in configs} == {64}
        assert {sum(segment.examples for segment in config.task.train) for config in configs} == {100_000}
    else:
        whole = plan_of(name)
        assert len(configs) <= len(whole.runs) / 10
        models = {run.model for run in whole.runs}
        some = {"ReBased", "Based", "x²"} if f"{name}{size}" == "table1-cpu" else models  # it has to learn in minutes
        assert {run.model for run in plan.runs} == some
    if size == "-cpu":
        assert {config.train.device for config in configs} == {"cpu"}


def test_shipped_sweeps_are_all_named_here() -> None:
    names = {path.stem for path in (CONFIGS / "sweeps").iterdir()}
    sizes = {f"{name}{size}" for name in RUNS for size in ("", "-small", "-cpu")}
    assert names == sizes | {"demo", "enwik8", "table3-quick"}


def test_each_of_several_mistakes_is_said_where_it_is(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"grid point train\.lr=-1: .*\n.*grid point train\.lr=-2: "):
        load_sweep(write(tmp_path, {"train.lr": [-1, -2]}), {})


EVIDENCE = sorted(path.parent.name for path in (ROOT / "results").glob("*/sweep.yaml"))


@pytest.mark.parametrize("name", EVIDENCE)
def test_the_sweeps_of_the_evidence_are_on_the_page(name: str) -> None:
    plan = plan_of(str(ROOT / "results" / name / "sweep.yaml"))
    assert plan.runs
    assert plan.merged == 0
    assert f"`{name}`" in (ROOT / "docs" / "reproduce.md").read_text()
    precisions = {run.config.train.precision for run in plan.runs}
    assert precisions == ({"bf16"} if name.startswith(("enwik8", "mini-pile")) else {"tf32"})


def test_figure_1_has_the_papers_tasks_and_heads_has_its_heads() -> None:
    runs = plan_of("figure1").runs
    for split in ("train", "test", "held_out"):
        segments = [getattr(run.config.task, split)[0] for run in runs]
        assert {segment.seq_len: segment.kv_pairs for segment in segments} == PAIRS_BY_LENGTH
    configs = [run.config for run in plan_of("heads").runs]
    shapes = {
        (
            config.model.d_model,
            *(config.model.mixers[1].arguments()[key] for key in ("n_heads", "value_width")),
        )
        for config in configs
    }
    assert shapes == {(d, h, d // h if h == 12 else None) for d in (16, 24, 32, 48) for h in (1, 2, 12)}


def test_table_3_has_the_papers_task_and_kernels_has_table_1s() -> None:
    configs = [run.config for run in plan_of("table3").runs]
    assert {(each.task.held_out[0].seq_len, each.task.held_out[0].kv_pairs) for each in configs} == {(128, 32)}
    assert {config.task.held_out[0].examples for config in configs} == {10_000}
    assert {config.model.mixers[0].name for config in configs} == {"previous_token"}
    ours = {run.config.digest() for run in plan_of("kernels-small").runs}
    known = {run.config.digest() for run in plan_of("table1-small").runs if run.config.model.d_model == 24}
    assert known <= ours  # the six kernels of Table 1 are the same runs in both, under the same digests


def test_the_base_may_be_a_shipped_config(tmp_path: Path) -> None:
    """A file beside the sweep comes first; without a checkout a name is enough."""
    path = tmp_path / "sweep.yaml"
    path.write_text("base: mqar/quick\ngrid: {train.seed: [1, 2]}\n")
    assert [point.config.train.seed for point in load_sweep(path, {}).points] == [1, 2]
    path.write_text("base: mqar/quikc\ngrid: {train.seed: [1, 2]}\n")
    with pytest.raises(FileNotFoundError, match="did you mean 'mqar/quick'"):
        load_sweep(path, {})
