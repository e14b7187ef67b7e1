"""The tables of a report on synthetic tasks."""

from collections.abc import Sequence
from statistics import fmean

from rebased.analysis.selection import expected_validation_performance
from rebased.config import grouped
from rebased.report.comparisons import BRIEF, PAIRS, TESTS, Contrast, difference_of, pair_cells, result_cells
from rebased.report.synthetic.cells import Cell, Results, SliceKind, has_learned
from rebased.report.tables import NONE, Number, Table, number, plus_minus
from rebased.runs.finished import Run
from rebased.runs.run_names import model_names, task_names


def width_table(results: Results, task: str) -> Table:
    """One row per model: mean ± sample standard deviation over seeds by width, with reference values beside where
    known."""
    cells = results.of_task(task)
    widths = sorted({cell.d_model for cell in cells})
    known = {cell.d_model for cell in cells if cell.reference_value}
    head = ["model"]
    for d_model in widths:
        head += [f"D = {d_model}", results.known.name] if d_model in known else [f"D = {d_model}"]
    rows = []
    for model, line in grouped(cells, lambda cell: cell.model).items():
        row, found = [str(model)], {cell.d_model: cell for cell in line}
        for d_model in widths:
            cell = found.get(d_model)
            row += [plus_minus(cell.test) if cell else NONE]
            row += [reference_cell(cell)] if d_model in known else []
        mean = fmean(cell.test.mean for cell in line) if len(found) == len(widths) else None
        rows.append((*row, number(mean)) if len(widths) > 1 else tuple(row))
    return Table((*head, "mean") if len(widths) > 1 else tuple(head), rows)


def results_table(results: Results) -> Table:
    """One row per cell: the chosen learning rate, test and held-out accuracy, and the reference value."""
    named = (results.known.name,) if results.known.name else ()
    head = (
        *("model", "task", "D", "lr", "of rates", "chosen on seeds", "seeds", "test", "sd", "95% from", "to"),
        *("held out", "held out sd", "diverged", "parameters", "state bytes", *named),
    )
    brief = ("model", "task", "D", "lr", "seeds", "test", "sd", "held out", "held out sd", *named)
    rows = [
        (
            *(*place_of(cell), number(cell.choice.lr, "g"), *compared(cell), number(cell.test.n, "d")),
            *(number(value) for value in (cell.test.mean, cell.test.sd, cell.test.low, cell.test.high)),
            *(number(getattr(cell.held_out, name, None)) for name in ("mean", "sd")),
            number(sum(run.status == "diverged" for run in cell.all_runs), "d"),
            *(number(cell.any_run.parameters, ","), number(cell.state_bytes, ",")),
            *((reference_cell(cell),) if named else ()),
        )
        for cell in results.cells
    ]
    return Table(head, rows, brief)


def compared(cell: Cell) -> tuple[str, str]:
    """The learning rates that the chosen one was compared with, and the seeds: "42, 43", or "42 to 51" if many follow
    one another."""
    rates = sorted(cell.runs if cell.choice.staged else set(cell.runs) - set(cell.choice.left_out))
    seeds = sorted(cell.choice.staged or cell.chosen)
    whole = len(seeds) > 3 and seeds == list(range(seeds[0], seeds[-1] + 1))
    return ", ".join(f"{lr:g}" for lr in rates), f"{seeds[0]} to {seeds[-1]}" if whole else ", ".join(map(str, seeds))


def place_of(cell: Cell) -> tuple[str, str, str]:
    """The model, task and width of a cell."""
    return str(cell.model), cell.task, number(cell.d_model, "d")


def reference_cell(cell: Cell | None) -> str:
    """What others report for a cell; a dash where nothing is known."""
    value = cell.reference_value if cell else None
    if value is None:
        return NONE
    return Number(str(value), value.mean, {"sd": value.sd, "bound": "at least" if value.at_least else None})


def runs_table(runs: Sequence[Run], results: Results) -> Table:
    """One row per run, also of those that are in no result; models and tasks have the names of the results."""
    head = (
        *("run", "model", "task", "D", "lr", "seed", "accuracy", "held out", "epoch", "epochs"),
        *("precision", "seconds", "status", "code", "device"),
    )
    settings = [run.settings for run in runs]
    tasks = task_names(settings)
    own = zip(map(str, model_names(settings, tasks)), tasks, strict=True)
    named = {run.digest: (str(cell.model), cell.task) for cell in results.cells for run in cell.all_runs}
    names = [named.get(run.digest, name) for run, name in zip(runs, own, strict=True)]
    brief = ("run", "model", "task", "D", "lr", "seed", "accuracy", "held out")
    rows = [
        (
            *(run.digest, *name, number(run.d_model, "d"), number(run.lr, "g"), number(run.seed, "d")),
            *(number(run.best.accuracy, ".4f"), number(run.held_out, ".4f")),
            *(number(run.best.epoch, "d"), number(len(run.epochs), "d")),
            *(str(run.settings["train"].get("precision", NONE)), number(run.seconds, ".1f")),
            *(run.status, run.code, run.device),
        )
        for run, name in zip(runs, names, strict=True)
    ]
    return Table(head, rows, brief)


def comparison_table(contrasts: Sequence[Contrast]) -> Table:
    """One row per comparison: the paired difference and the tests."""
    place = ("comparison", "task", "D")
    rows = [
        (
            *(difference_of(one.reference, one.other), one.task, ", ".join(map(str, one.widths))),
            *(*result_cells(one), one.split, *pair_cells(one)),
        )
        for one in contrasts
    ]
    return Table((*place, *TESTS, "split", *PAIRS), rows, (*place, *BRIEF))


def budget_table(results: Results) -> Table:
    """One row per cell: the expected accuracy of the best of 1, 2, ... learning rates, by both estimators."""
    most = max(len(cell.lr_means) for cell in results.cells)
    budgets = [f"{kind} {m}" for kind in ("with", "without") for m in range(1, most + 1)]
    rows = []
    for cell in results.cells:
        again, anew = (expected_validation_performance(cell.lr_means, replacement) for replacement in (True, False))
        empty = [NONE] * (most - len(again))
        rows.append((*place_of(cell), *map(number, again), *empty, *map(number, anew), *empty))
    return Table(("model", "task", "D", *budgets), rows)


def not_learned_table(results: Results) -> Table:
    """One row per cell of the tasks that some run learned: how many runs did not, by learning rate."""
    cells = [cell for cell in results.cells if results.learned(cell.task)]
    rates = sorted({lr for cell in cells for lr in cell.runs})
    rows = []
    for cell in cells:
        counts = (not_learned(list(cell.runs[lr].values())) if lr in cell.runs else NONE for lr in rates)
        rows.append((*place_of(cell), *counts, not_learned(cell.all_runs)))
    return Table(("model", "task", "D", *(f"lr {lr:g}" for lr in rates), "all"), rows)


def not_learned(runs: Sequence[Run]) -> str:
    """How many of these runs did not learn: '3 of 5'."""
    count = sum(not has_learned(run) for run in runs)
    return Number(f"{count} of {len(runs)}", count, {"runs": len(runs)})


def slice_table(results: Results, kind: SliceKind) -> Table:
    """One row per cell: accuracy by number of pairs, by length or by a task's slices, mean over seeds at the chosen
    learning rate."""
    cells = [cell for cell in results.cells if len(cell.slices(kind)) > 1]
    parts = sorted({part for cell in cells for part in cell.slices(kind)})
    words = {"by_pairs": "{} pairs", "by_length": "T = {}", "slices": "{}"}
    heads = [words[kind].format(part) for part in parts]
    rows = [(*place_of(cell), *(number(cell.slices(kind).get(part)) for part in parts)) for cell in cells]
    return Table(("model", "task", "D", *heads), rows)
