"""The tables of a report on synthetic tasks."""

import re
from collections.abc import Sequence
from statistics import fmean

from rebased.analysis.selection import expected_validation_performance
from rebased.report.comparisons import BRIEF, PAIRS, TESTS, pair_cells, result_cells
from rebased.report.synthetic.cells import Cell, Results, SliceKind, has_learned
from rebased.report.synthetic.comparisons import Contrast
from rebased.report.synthetic.heads import HeadsByPlace, name_of_values
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
    for model in (model for model in results.models if any(cell.model == model for cell in cells)):
        row, means = [str(model)], []
        for d_model in widths:
            cell = results.find(task, model, d_model)
            row.append(plus_minus(cell.test) if cell else NONE)
            means += [cell.test.mean] if cell else []
            if d_model in known:
                row.append(reference_cell(cell))
        mean = number(fmean(means) if len(means) == len(widths) else None)
        rows.append((*row, mean) if len(widths) > 1 else tuple(row))
    return Table((*head, "mean") if len(widths) > 1 else tuple(head), rows)


def results_table(results: Results) -> Table:
    """One row per cell: the chosen learning rate, test and held-out accuracy, and the reference value."""
    named = (results.known.name,) if results.known.name else ()
    head = (
        *("model", "task", "D", "lr", "rates", "seeds", "test", "sd", "95% from", "to"),
        *("held out", "held out sd", "diverged", "parameters", "state bytes", *named),
    )
    brief = ("model", "task", "D", "lr", "seeds", "test", "sd", "held out", "held out sd", *named)
    return task_last(Table(head, [_result(cell) for cell in results.cells], brief))


def task_last(table: Table) -> Table:
    """Move the second column, the task, to the end if all rows have the same task; a brief table then leaves it out."""
    if len({row[1] for row in table.rows}) > 1:
        return table
    head, *rows = ((line[0], *line[2:], line[1]) for line in (table.head, *table.rows))
    return Table(head, rows, tuple(name for name in table.brief or head if name != "task"))


def _result(cell: Cell) -> tuple[str, ...]:
    run = cell.any_run
    held_out = cell.held_out
    return (
        str(cell.model),
        cell.task,
        number(cell.d_model, "d"),
        number(cell.choice.lr, "g"),
        number(len(cell.runs), "d"),
        number(cell.test.n, "d"),
        *(number(value) for value in (cell.test.mean, cell.test.sd, cell.test.low, cell.test.high)),
        number(held_out.mean if held_out else None),
        number(held_out.sd if held_out else None),
        number(sum(run.status == "diverged" for run in cell.all_runs), "d"),
        number(run.parameters, ","),
        number(cell.state_bytes, ","),
        *((reference_cell(cell),) if cell.known.name else ()),
    )


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
    named = {run.digest: (str(cell.model), cell.task) for cell in results.cells for run in cell.all_runs}
    names = [
        named.get(run.digest, (str(model), task))
        for run, model, task in zip(runs, model_names(settings, tasks), tasks, strict=True)
    ]
    brief = ("run", "model", "task", "D", "lr", "seed", "accuracy", "held out")
    return Table(head, [_run(run, *name) for run, name in zip(runs, names, strict=True)], brief)


def _run(run: Run, model: str, task: str) -> tuple[str, ...]:
    return (
        run.digest,
        model,
        task,
        number(run.d_model, "d"),
        number(run.lr, "g"),
        number(run.seed, "d"),
        number(run.best.accuracy, ".4f"),
        number(run.held_out, ".4f"),
        number(run.best.epoch, "d"),
        number(len(run.epochs), "d"),
        str(run.settings["train"].get("precision", NONE)),
        number(run.seconds, ".1f"),
        run.status,
        run.code,
        run.device,
    )


def comparison_table(contrasts: Sequence[Contrast]) -> Table:
    """One row per comparison: the paired difference and the tests."""
    place = ("comparison", "task", "D")
    rows = [
        (
            difference_of(one.reference, one.other),
            one.task,
            ", ".join(map(str, one.widths)),
            *result_cells(one),
            one.split,
            *pair_cells(one),
        )
        for one in contrasts
    ]
    return task_last(Table((*place, *TESTS, "split", *PAIRS), rows, (*place, *BRIEF)))


def difference_of(one: str, other: str) -> str:
    """Settings that both names state are written once: 'ReBased − Based (n_heads 2)'."""
    apart = re.search(r" \([^()]*\)$", one)
    return f"{one.removesuffix(apart[0]) if apart and other.endswith(apart[0]) else one} − {other}"


def budget_table(results: Results) -> Table:
    """One row per cell: the expected accuracy of the best of 1, 2, ... learning rates, by both estimators."""
    most = max(len(cell.lr_means) for cell in results.cells)
    budgets = [f"{kind} {m}" for kind in ("with", "without") for m in range(1, most + 1)]
    rows = []
    for cell in results.cells:
        row = [str(cell.model), cell.task, number(cell.d_model, "d")]
        for replacement in (True, False):
            best = expected_validation_performance(cell.lr_means, replacement)
            row += [*(number(value) for value in best), *[NONE] * (most - len(best))]
        rows.append(tuple(row))
    return task_last(Table(("model", "task", "D", *budgets), rows))


def not_learned_table(results: Results) -> Table:
    """One row per cell of the tasks that some run learned: how many runs did not, by learning rate."""
    cells = [cell for cell in results.cells if results.learned(cell.task)]
    rates = sorted({lr for cell in cells for lr in cell.runs})
    rows = []
    for cell in cells:
        counts = (not_learned(list(cell.runs[lr].values())) if lr in cell.runs else NONE for lr in rates)
        rows.append((str(cell.model), cell.task, number(cell.d_model, "d"), *counts, not_learned(cell.all_runs)))
    return task_last(Table(("model", "task", "D", *(f"lr {lr:g}" for lr in rates), "all"), rows))


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
    rows = []
    for cell in cells:
        found = cell.slices(kind)
        values = (number(found.get(part)) for part in parts)
        rows.append((str(cell.model), cell.task, number(cell.d_model, "d"), *values))
    return task_last(Table(("model", "task", "D", *heads), rows))


def heads_table(places: HeadsByPlace) -> Table:
    """One row per model and number of heads, with the reference value."""
    name = name_of_values(places)
    rows = []
    for cells in places.values():
        for heads, cell in cells:
            value = cell.reference_value
            off = number(None if value is None else abs(cell.test.mean - value.mean))
            place = (cell.model.kind, cell.task, number(cell.d_model, "d"), number(heads, "d"))
            row = (*place, plus_minus(cell.test))
            rows.append((*row, reference_cell(cell), off) if name else row)
    return task_last(Table(("model", "task", "D", "heads", "test", *((name, "distance") if name else ())), rows))
