"""Settings in which compared runs differ although no name says so: they may cause the differences (confounds).

And runs that ended before they had learned what they can, told from their learning curves.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

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


class Short(NamedTuple):
    """How many of a model's runs ended too early."""

    model: str
    runs: int
    improving: int  # the best test accuracy rose by more than RISE in the last quarter of the epochs
    late: int  # half of the way from guessing to the best accuracy was reached in the second half of the epochs
    either: int


def is_improving(curve: Sequence[float]) -> bool:
    """True if the best value of the last quarter of a learning curve is more than RISE above the best before it."""
    last = max(1, len(curve) // 4)
    return len(curve) > last and max(curve[-last:]) - max(curve[:-last]) > RISE


def left_plateau_late(curve: Sequence[float], guessing: float) -> bool:
    """True if a learning curve comes halfway from guessing to its best value only in the second half of its epochs."""
    half = guessing + (max(curve) - guessing) / 2
    return 2 * next(i for i, value in enumerate(curve) if value >= half) >= len(curve)


def find_short(runs: Sequence[tuple[str, Run]]) -> list[Short]:
    """Count, for each model, the runs that ended too early; models without any are left out.

    Not judged: runs that solved the task, that gave up, that learned nothing (the page counts them elsewhere), or whose
    record lacks epochs.
    """
    counts: dict[str, Counter[str]] = {}
    for model, run in runs:
        curve, solved = run.accuracies, run.settings["train"].get("stop_above", 1.0)
        whole = len(curve) > 1 and not run.gave_up and not run.lacks_epochs
        judged = whole and has_learned(run) and max(curve) < min(solved, SOLVED)
        improving = judged and is_improving(curve)
        late = judged and left_plateau_late(curve, min(curve) if run.chance is None else run.chance)
        found = {"runs": 1, "improving": int(improving), "late": int(late), "either": int(improving or late)}
        counts.setdefault(model, Counter()).update(found)
    return [Short(model, **found) for model, found in counts.items() if found["either"]]


def warn_about_short_training(runs: Sequence[tuple[str, Run]]) -> str | None:
    """A sentence about runs, each with the name of its model, that ended too early; None if there is none."""
    found = find_short(runs)
    if not found:
        return None
    improving, late, either = (sum(getattr(short, name) for short in found) for name in ("improving", "late", "either"))
    return (
        f"Perhaps trained too short: {either} of {plural(len(runs), 'run')}. {improving} still improved at the end (by "
        f"more than {RISE:g} in the last quarter of the epochs), {late} left the plateau late (halfway to their best "
        f"accuracy in the second half). More epochs (train.epochs) may change the order of the models. By model: "
        f"{', '.join(f'{short.model} {short.either} of {short.runs}' for short in found)}."
    )
