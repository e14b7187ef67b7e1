"""Runs that stand side by side, or in one cell, and were not made alike: a difference may come from that."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from rebased.report.synthetic.cells import Results
from rebased.runs.finished import Run
from rebased.runs.run_names import ModelName, own_settings

Mixture = dict[str, Counter[str]]
"""By setting: how many runs have which value; only settings of which there are several values."""

TRAIN = "train."
COMPUTED = ("micro_batch", "capture", "compile")


def trained_apart(results: Results) -> Mixture:
    """Settings of the training in which runs of one task differ, unless the names of all its models tell them. Between
    runs of one model and width names do; between models, or between the widths of one, they need not."""
    found: Mixture = {}
    for cells in (results.of_task(task) for task in results.tasks):
        told = set.intersection(*(settings_in(cell.model) for cell in cells))
        differ = mixture([[how_trained(run) for cell in cells for run in cell.all_runs]])
        for key, values in differ.items():
            if key not in told:
                found.setdefault(key, Counter()).update(values)
    return found


def settings_in(name: ModelName) -> set[str]:
    """'n_heads 2, train.eps 1e-8' -> {'n_heads', 'eps'}"""
    return {part.split(" ")[0].rpartition(".")[2] for part in name.apart.split(", ")}


def computed_apart(results: Results) -> Mixture:
    """What a result should not depend on, and in which the runs of some cell differ all the same."""
    return mixture((how_computed(run) for run in cell.all_runs) for cell in results.cells)


def how_trained(run: Run) -> dict[str, Any]:
    settings = own_settings(run.settings)
    return {path.removeprefix(TRAIN): leaf for path, leaf in settings.items() if path.startswith(TRAIN)}


def how_computed(run: Run) -> dict[str, Any]:
    """Where it ran counts, not where it was told to."""
    train = run.settings["train"]
    return {"device": run.device} | {key: train[key] for key in COMPUTED if key in train}


def mixture(groups: Iterable[Iterable[dict[str, Any]]]) -> Mixture:
    """Over groups of runs: those settings that differ within one of them."""
    found: Mixture = {}
    for group in groups:
        counts: Mixture = {}
        for settings in group:
            for key, value in settings.items():
                counts.setdefault(key, Counter())["none" if value is None else str(value)] += 1
        for key, values in counts.items():
            if len(values) > 1:
                found.setdefault(key, Counter()).update(values)
    return found
