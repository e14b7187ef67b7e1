"""Settings in which compared runs differ although no name says so: they may cause the differences (confounds).

And runs that ended before they had learned what they can, told from their learning curves.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from rebased.config import grouped, plural
from rebased.report.synthetic.cells import Results, has_learned
from rebased.runs.finished import Run
from rebased.runs.run_names import ModelName, distinguishing_settings

Confounds = dict[str, Counter[str]]
"""By setting with several values: how many runs have each value."""

TRAIN = "train."
EXECUTION = ("micro_batch", "capture", "compile")


def training_confounds(results: Results) -> Confounds:
    """Training settings in which runs of one task differ, unless the names of all its models state them. Names always
    state differences between runs of one model and width, but not between models or widths."""
    groups = []
    for cells in map(results.of_task, results.tasks):
        named = set.intersection(*(settings_in(cell.model) for cell in cells))
        settings = (training_settings(run) for cell in cells for run in cell.all_runs)
        groups.append([{key: value for key, value in own.items() if key not in named} for own in settings])
    return differing(groups)


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
        pairs = [(key, "none" if value is None else str(value)) for own in group for key, value in own.items()]
        for key, values in grouped(pairs, lambda pair: pair[0]).items():
            counts = Counter(value for _, value in values)
            if len(counts) > 1:
                found.setdefault(key, Counter()).update(counts)
    return found


RISE = 0.02
"""Test accuracy that a run must gain in its last quarter of epochs to count as still improving."""

SOLVED = 0.99  # a run above this accuracy has nothing left to learn


def is_improving(curve: Sequence[float]) -> bool:
    """True if the best value of the last quarter of a learning curve is more than RISE above the best before it."""
    last = max(1, len(curve) // 4)
    return len(curve) > last and max(curve[-last:]) - max(curve[:-last]) > RISE


def left_plateau_late(curve: Sequence[float], guessing: float) -> bool:
    """True if a learning curve comes halfway from guessing to its best value only in the second half of its epochs."""
    half = guessing + (max(curve) - guessing) / 2
    return 2 * next(i for i, value in enumerate(curve) if value >= half) >= len(curve)


def signs_of_short_training(run: Run) -> tuple[bool, bool]:
    """(whether it still improved at the end, whether it left the plateau late). Both are False of runs that solved the
    task, gave up or learned nothing (the page counts them elsewhere), and where the record lacks epochs."""
    curve, solved = run.accuracies, min(run.settings["train"].get("stop_above", 1.0), SOLVED)
    whole = len(curve) > 1 and not run.gave_up and not run.lacks_epochs
    if not whole or not has_learned(run) or max(curve) >= solved:
        return False, False
    return is_improving(curve), left_plateau_late(curve, min(curve) if run.chance is None else run.chance)


def warn_about_short_training(runs: Sequence[tuple[str, Run]]) -> str | None:
    """A sentence about runs, each with the name of its model, that ended too early; None if there is none."""
    signs = [(model, *signs_of_short_training(run)) for model, run in runs]
    short = Counter(model for model, improving, late in signs if improving or late)
    if not short:
        return None
    trained = Counter(model for model, _ in runs)
    by_model = [f"{model} {short[model]} of {n}" for model, n in trained.items() if short[model]]
    return (
        f"Perhaps trained too short: {short.total()} of {plural(len(runs), 'run')}. "
        f"{sum(improving for _, improving, _ in signs)} still improved at the end, {sum(late for *_, late in signs)} "
        f"left the plateau late: {', '.join(by_model)}."
    )
