"""Settings in which compared runs differ although no name says so: they may cause the differences (confounds)."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from rebased.report.synthetic.cells import Results
from rebased.runs.finished import Run
from rebased.runs.run_names import ModelName, distinguishing_settings

Confounds = dict[str, Counter[str]]
"""By setting with several values: how many runs have each value."""

TRAIN = "train."
EXECUTION = ("micro_batch", "capture", "compile")


def training_confounds(results: Results) -> Confounds:
    """Training settings in which runs of one task differ, unless the names of all its models state them. Names always
    state differences between runs of one model and width, but not between models or widths."""
    found: Confounds = {}
    for cells in (results.of_task(task) for task in results.tasks):
        named = set.intersection(*(settings_in(cell.model) for cell in cells))
        differ = differing([[training_settings(run) for cell in cells for run in cell.all_runs]])
        for key, values in differ.items():
            if key not in named:
                found.setdefault(key, Counter()).update(values)
    return found


def settings_in(name: ModelName) -> set[str]:
    """The settings that a name states: 'n_heads 2, train.eps 1e-8' -> {'n_heads', 'eps'}"""
    return {part.split(" ")[0].rpartition(".")[2] for part in name.differences.split(", ")}


def execution_confounds(results: Results) -> Confounds:
    """Execution settings in which the runs of one cell differ. Results should not depend on them."""
    return differing((execution_settings(run) for run in cell.all_runs) for cell in results.cells)


def training_settings(run: Run) -> dict[str, Any]:
    """The training settings of a run, without the learning rate, the seed and execution settings."""
    settings = distinguishing_settings(run.settings)
    return {path.removeprefix(TRAIN): leaf for path, leaf in settings.items() if path.startswith(TRAIN)}


def execution_settings(run: Run) -> dict[str, Any]:
    """The execution settings of a run, with the device that it ran on instead of the one in its config."""
    train = run.settings["train"]
    return {"device": run.device} | {key: train[key] for key in EXECUTION if key in train}


def differing(groups: Iterable[Iterable[dict[str, Any]]]) -> Confounds:
    """The settings that differ within at least one group of runs."""
    found: Confounds = {}
    for group in groups:
        counts: Confounds = {}
        for settings in group:
            for key, value in settings.items():
                counts.setdefault(key, Counter())["none" if value is None else str(value)] += 1
        for key, values in counts.items():
            if len(values) > 1:
                found.setdefault(key, Counter()).update(values)
    return found
