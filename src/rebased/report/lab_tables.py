"""The tables of `rebased report`."""

from collections.abc import Sequence
from math import isnan
from statistics import fmean

from rebased.analysis import Spread
from rebased.report.cells import Cell, Results
from rebased.report.runs import Run
from rebased.report.tables import Table

NONE = "–"


def width_table(results: Results, task: str) -> Table:
    """As the paper's Table 1: models by width, mean ± sample sd over seeds; its own values beside ours where known."""
    cells = results.of_task(task)
    widths = sorted({cell.d_model for cell in cells})
    known = {cell.d_model for cell in cells if cell.paper}
    head = ["model"]
    for d_model in widths:
        head += [f"D = {d_model}", "paper"] if d_model in known else [f"D = {d_model}"]
    rows = []
    for model in (model for model in results.models if any(cell.model == model for cell in cells)):
        row, means = [model], []
        for d_model in widths:
            cell = results.find(task, model, d_model)
            row.append(plus_minus(cell.test) if cell else NONE)
            means += [cell.test.mean] if cell else []
            if d_model in known:
                row.append(str(cell.paper) if cell and cell.paper else NONE)
        rows.append((*row, f"{fmean(means):.3f}" if len(means) == len(widths) else NONE))
    return Table((*head, "mean"), rows)


def results_table(results: Results) -> Table:
    """Every cell: the chosen rate, what was recalled by both ways of reporting, and the paper's value."""
    head = (
        *("model", "task", "D", "lr", "rates", "seeds", "test", "sd", "95% from", "to", "held out", "sd", "diverged"),
        *("parameters", "state bytes", "paper"),
    )
    return Table(head, [_result(cell) for cell in results.cells])


def _result(cell: Cell) -> tuple[str, ...]:
    run = cell.any_run
    held_out = cell.held_out
    state = run.state_bytes(run.seq_len)
    return (
        cell.model,
        cell.task,
        str(cell.d_model),
        f"{cell.choice.lr:g}",
        str(len(cell.runs)),
        str(cell.test.n),
        *(number(value) for value in (cell.test.mean, cell.test.sd, cell.test.low, cell.test.high)),
        number(held_out.mean) if held_out else NONE,
        number(held_out.sd) if held_out else NONE,
        str(sum(run.status == "diverged" for runs in cell.runs.values() for run in runs.values())),
        str(run.parameters),
        NONE if state is None else str(state),
        str(cell.paper or NONE),
    )


def runs_table(runs: Sequence[Run]) -> Table:
    head = (
        "run",
        "model",
        "T",
        "D",
        "lr",
        "seed",
        "accuracy",
        "held out",
        "epoch",
        "epochs",
        "seconds",
        "status",
        "code",
        "device",
    )
    return Table(head, [_run(run) for run in runs])


def _run(run: Run) -> tuple[str, ...]:
    return (
        run.digest,
        run.model,
        str(run.seq_len),
        str(run.d_model),
        f"{run.lr:g}",
        str(run.seed),
        f"{run.best.accuracy:.4f}",
        NONE if run.held_out is None else f"{run.held_out:.4f}",
        str(run.best.epoch),
        str(len(run.epochs)),
        f"{run.seconds:.1f}",
        run.status,
        run.code,
        run.device,
    )


def plus_minus(spread: Spread) -> str:
    return f"{spread.mean:.3f}" if isnan(spread.sd) else f"{spread.mean:.3f} ± {spread.sd:.3f}"


def number(value: float) -> str:
    return NONE if isnan(value) else f"{value:.3f}"
