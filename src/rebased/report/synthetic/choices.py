"""How the learning rate of each cell was chosen, and which runs a rule ended early."""

from collections import Counter
from collections.abc import Iterator, Sequence

from rebased.config import plural
from rebased.report.prose import shortened
from rebased.report.synthetic.cells import Cell, Results
from rebased.runs.finished import Run

ONE, FULL, STAGES, UNEVEN = "one rate", "all rates, all seeds", "in stages", "uneven"
EXPLAINED = {
    FULL: "all rates have the same number of seeds, and the best mean over seeds was chosen",
    STAGES: "all rates were compared on the first seeds, and only the chosen one has the other seeds",
    UNEVEN: "some rates have fewer seeds than others and could not be chosen",
    ONE: "there is one rate only",
}


def rule_of(cell: Cell) -> str:
    """How the learning rate of a cell was chosen: one of the four words above."""
    if len(cell.runs) == 1:
        return ONE
    if not cell.choice.left_out:
        return FULL
    return STAGES if cell.choice.staged else UNEVEN


def describe_choices(results: Results) -> str:
    """How many cells were chosen by which rule, in words."""
    counts = Counter(map(rule_of, results.cells))
    parts = [f"{plural(counts[rule], 'cell')}, {rule}: {words}" for rule, words in EXPLAINED.items() if counts[rule]]
    return f"How the learning rate was chosen. {'; '.join(parts)}."


def warn_about_diverged(runs: Sequence[Run]) -> Iterator[str]:
    """A sentence if some of the runs diverged."""
    if diverged := [run for run in runs if run.status == "diverged"]:
        early = sum(not run.epochs for run in diverged)
        yield (
            f"{plural(len(diverged), 'run')} diverged. Each counts with the best accuracy it had reached. "
            f"{early} of them diverged before the end of the first epoch and count with 0."
        )


def describe_given_up(runs: Sequence[Run]) -> Iterator[str]:
    """One sentence per rule `train.give_up` that ended runs early: the rule, how many runs it ended, and which."""
    ended: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        rule = run.settings["train"].get("give_up")
        if run.gave_up and isinstance(rule, dict):
            ended.setdefault((str(rule.get("below")), str(rule.get("after_epoch"))), []).append(run)
    for (below, epoch), group in ended.items():
        names = [f"{run.model} (D = {run.d_model}, lr {run.lr:g}, seed {run.seed})" for run in group]
        yield (
            f"{plural(len(group), 'run')} ended early by a rule that was set before: test accuracy still below "
            f"{below} after epoch {epoch} (train.give_up). Each counts with the best accuracy it had reached; it "
            f"might have begun to learn later. {shortened(names)}."
        )
