"""A sweep file: a base run, grids of settings that the runs of the sweep change in it, and its stages."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import Field, ValidationError

from rebased.config import Config, did_you_mean, merge, mistakes_by_source, nest, parse_yaml, plural, read_yaml
from rebased.models import LMConfig, check_model_fits, shape_of
from rebased.runs.configs import KINDS, parse_run, run_kind
from rebased.runs.run_config import RunConfig
from rebased.runs.run_names import flatten
from rebased.runs.shipped import find_config

SEED = "train.seed"
MOST_RUNS = 50_000  # grid points: each becomes a config in memory and a folder on disk


class Point(NamedTuple):
    """One combination of the grid: the settings that it changes in the base, and the resulting config."""

    settings: dict[str, Any]
    config: RunConfig

    def __str__(self) -> str:
        return describe(self.settings)


def describe(settings: Mapping[str, Any]) -> str:
    """The settings in words: "train.lr=0.001, train.seed=42"."""
    return ", ".join(f"{key}={value}" for key, value in settings.items()) or "the base"


class Select(Config):
    """Stages: all values of one setting are tried with the first seeds, and the best one gets the other seeds."""

    setting: str = Field(
        "train.lr",
        description="the setting that is chosen, per cell: per set of runs that differ only in it and in the seed",
    )
    seeds: int = Field(2, ge=1, description="seeds with which every value is tried")
    others: Literal["skip", "last"] = Field(
        "skip", description="runs of the other values with the other seeds: never trained, or after all chosen ones"
    )


class Sweep(NamedTuple):
    """A sweep as its file describes it."""

    points: list[Point]
    select: Select | None = None
    by_task: bool = False  # one task is finished before the next one begins


class SweepFile(Config):
    """The content of a sweep file. Every combination of the entries of all axes in `grid` is a run.

    An axis named by a setting, such as train.lr, is a list of its values. An axis with another name changes several
    settings together. It is a list of mappings, or a mapping of lists: the first entries of all lists are used
    together, then the second ones, and so on. In a file `grid` may be a list of grids: the runs of all of them.
    """

    base: dict[str, Any]
    grid: dict[str, Any]
    select: Select | None = None


def load_sweep(path: Path, overrides: Mapping[str, str]) -> Sweep:
    """The sweep in a YAML file. Raises ValueError if a point is no valid run.

    `overrides` change a setting of every run, {"train.epochs": "2"}, an axis, {"grid.train.seed": "[42]"}, or the
    stages, {"select.seeds": "3"}. Of several grids, those that have the axis are changed.
    """
    tree = read_yaml(path)
    if misplaced := [key for key in (*KINDS, "model", "train") if key in tree]:
        raise ValueError(
            f"{path}: {misplaced[0]} is at the top level, so this is the config of one run; train it with "
            f"`rebased {run_kind(tree).verb}`, or put it under base and add a grid"
        )
    if isinstance(tree.get("base"), str):
        beside = path.parent / tree["base"]
        tree["base"] = read_yaml(beside if beside.exists() else find_config(tree["base"], "run"))
    fixed: dict[str, Any] = {}
    grid_options: dict[str, str] = {}
    for key, text in overrides.items():
        value = parse_yaml(text, f"--{key}")
        if key.startswith("grid."):
            change_axis(tree.get("grid"), key, value)
            grid_options |= dict.fromkeys(settings_of(key.removeprefix("grid."), value), f"--{key}")
        elif key == "select" or key.startswith("select."):
            tree = merge(tree, nest({key: value}))
        else:
            fixed[key] = value
    grids: Any = tree.get("grid")
    several = isinstance(grids, list) and grids and all(isinstance(grid, dict) for grid in grids)
    try:
        trees = [tree | {"grid": grid} for grid in grids] if several else [tree]
        sweeps = [SweepFile.model_validate(one) for one in trees]
    except ValidationError as error:
        options = {key: f"--{key}" for key in overrides if key not in fixed}
        raise ValueError("\n".join(map(": ".join, mistakes_by_source(error, str(path), options)))) from error
    sweep, options = sweeps[0], grid_options | {key: f"--{key}" for key in fixed}
    points, mistakes, total = [], dict[tuple[str, str], list[str]](), 0
    for combination in combinations(path, [one.grid for one in sweeps], overrides):
        settings: dict[str, Any] = {}
        for entry in (*combination, fixed):
            settings |= entry
        try:
            points.append(Point(settings, parse_buildable(merge(sweep.base, nest(settings)))))
        except ValueError as error:
            for mistake in mistakes_by_source(error, str(path), options):
                mistakes.setdefault(mistake, []).append(describe(settings))
        total += 1
    if mistakes:
        raise ValueError("\n".join(locate(*mistake, where, total) for mistake, where in mistakes.items()))
    check_select(path, sweep.select, points)
    return Sweep(points, sweep.select)


def change_axis(grid: Any, key: str, value: Any) -> None:
    """Replace an axis of a grid, or of those of several grids that have it. `key` is grid. and its name."""
    axis = key.removeprefix("grid.")
    grids = [one for one in (grid if isinstance(grid, list) else [grid]) if isinstance(one, dict)]
    known = list(dict.fromkeys(name for one in grids for name in one))
    if grids and axis not in known and ("." not in axis or len(grids) > 1):
        raise ValueError(f"--{key}: the grid has no axis {axis!r}; {did_you_mean(axis, known)}")
    for one in grids:
        if axis in one or axis not in known:
            one[axis] = value


def settings_of(name: str, axis: Any) -> Iterator[str]:
    """The settings that an axis changes: the one that it is named by, or those in its entries."""
    if "." in name:
        yield name
        return
    for entry in axis if isinstance(axis, list) else [axis]:
        if isinstance(entry, dict):
            yield from map(str, entry)


def combinations(
    path: Path, grids: Sequence[dict[str, Any]], overrides: Mapping[str, str]
) -> Iterator[tuple[dict[str, Any], ...]]:
    """The combinations of the axes of each grid, one grid after the other."""
    if not all(grids):
        raise ValueError(f"{path}: grid is empty; give it an axis, such as train.seed: [42, 43]")

    def place(name: str) -> str:
        return f"--grid.{name}" if f"grid.{name}" in overrides else f"{path}: grid.{name}"

    axes = [[list(entries(place(name), name, axis)) for name, axis in grid.items()] for grid in grids]
    if (count := sum(math.prod(map(len, each)) for each in axes)) > MOST_RUNS:
        raise ValueError(f"{path}: the grid has {count:,} combinations; at most {MOST_RUNS:,} are one sweep: divide it")
    for each in axes:
        yield from itertools.product(*each)


def check_select(path: Path, select: Select | None, points: Sequence[Point]) -> None:
    """Raise ValueError if the grid does not vary the setting that the stages choose, or has too few seeds for them."""
    if select is None:
        return
    settings = flatten(points[0].config.model_dump(mode="json")).keys() - {SEED}
    known = [key for key in dict.fromkeys(key for point in points for key in point.settings) if key in settings]
    if select.setting == SEED or (select.setting not in known and not is_varied(select.setting, points)):
        raise ValueError(
            f"{path}: select.setting {select.setting!r} should be a setting that the grid gives several values; "
            f"{did_you_mean(select.setting, known) if known else 'it has none'}"
        )
    seeds = {point.config.train.seed for point in points}
    if select.seeds > len(seeds):
        raise ValueError(
            f"{path}: select.seeds {select.seeds} is more than the {plural(len(seeds), 'seed')} of the grid; give it "
            f"more seeds, or --select.seeds {len(seeds)}"
        )


def is_varied(setting: str, points: Sequence[Point]) -> bool:
    """True if the configs have several values of a setting, whatever axis gives them."""
    return len({str(flatten(point.config.model_dump(mode="json")).get(setting)) for point in points}) > 1


def parse_buildable(tree: Any) -> RunConfig:
    """The config of these settings. Its model is built without weights, because some mistakes show only then."""
    config = parse_run(tree)
    check_model(config.model)
    return config


@cache
def check_model(model: LMConfig) -> None:
    """Raise ValueError if the model cannot be built."""
    check_model_fits(model)
    shape_of(model)


def entries(place: str, name: str, axis: Any) -> Iterator[dict[str, Any]]:
    """The entries of an axis, each a mapping from settings to values. `place` says where it is given, for errors."""
    if axis in ([], {}, None) or (isinstance(axis, dict) and all(values == [] for values in axis.values())):
        raise ValueError(f"{place} is empty; give it at least one value, or remove it")
    if "." in name:
        if not isinstance(axis, list):
            raise ValueError(f"{place} should be a list of values of that setting, [{axis}]; got {axis!r}")
        yield from ({name: value} for value in axis)
        return
    if isinstance(axis, dict) and all(isinstance(values, list) for values in axis.values()):
        lengths = {key: len(values) for key, values in axis.items()}
        if len(set(lengths.values())) > 1:
            counts = ", ".join(f"{key} has {n}" for key, n in lengths.items())
            raise ValueError(f"{place}: its lists are used together, so they must be equally long: {counts}")
        axis = [dict(zip(axis, values, strict=True)) for values in zip(*axis.values(), strict=True)]
    for entry in axis if isinstance(axis, list) else [axis]:
        if not isinstance(entry, dict) or not isinstance(axis, list):
            raise ValueError(
                f"{place} is not the path of a setting (such as train.lr), so its entries should be "
                f"mappings of settings ({{train.lr: 1e-3, train.epochs: 8}}); got {entry!r}"
            )
        if wrong := [key for key in entry if not isinstance(key, str)]:
            raise ValueError(f"{place}: {wrong[0]!r} is not the path of a setting, such as train.lr")
        yield entry


def locate(source: str, mistake: str, where: list[str], total: int) -> str:
    """The mistake with where its value came from: an option, or a file and the grid points, of `total` ones."""
    if source.startswith("--"):
        return f"{source}: {mistake}"
    if len(where) == total:
        return f"{source}: {mistake} (in every run; the first one has {where[0]})"
    others = f" and {len(where) - 1} more" if len(where) > 1 else ""
    return f"{source}: grid point {where[0]}{others}: {mistake}"


def from_python(path: Path, configs: Any, overrides: Mapping[str, str]) -> list[Point]:
    """The points of a Python sweep file, whose `configs` are RunConfigs or mappings as in a run's YAML file."""
    if not isinstance(configs, list | tuple) or not configs:
        raise ValueError(f"{path}: `configs` should be a list of RunConfigs or mappings, at least one; got {configs!r}")
    options = {key: f"--{key}" for key in overrides}
    fixed = {key: parse_yaml(text, options[key]) for key, text in overrides.items()}
    if unknown := [key for key in fixed if key.startswith("grid.")]:
        raise ValueError(f"--{unknown[0]}: {path} is a Python file and has no grid; change its `configs`")
    points = []
    for i, given in enumerate(configs):
        tree = given.model_dump() if isinstance(given, RunConfig) else given
        if not isinstance(tree, dict):
            raise ValueError(f"{path}: configs[{i}] should be a RunConfig, or a mapping as in its YAML; got {given!r}")
        try:
            points.append(Point({"configs": i, **fixed}, parse_buildable(merge(tree, nest(fixed)))))
        except ValueError as error:
            mistakes = mistakes_by_source(error, f"{path}: configs[{i}]", options)
            raise ValueError("\n".join(map(": ".join, mistakes))) from error
    return points
