"""The tables of a suite: recall per mixer and task, effects of factors, and rows for CSV files."""

from collections.abc import Mapping, Sequence
from itertools import product
from math import isfinite, isnan
from statistics import median

from rebased.analysis.paired import equals
from rebased.analysis.ranking import Contrast
from rebased.config import plural
from rebased.report.suite.board import Board, Outcome, SuiteCell
from rebased.report.tables import NONE, Number, Table, number

UNTUNED = "†"  # marks a cell whose rate was not tuned


def effect_table(board: Board) -> Table:
    """Two rows per factor, recall and the share of runs that began to learn; one column per task."""
    outcomes: dict[Outcome, str] = {"recall": "recall", "began": "began to learn"}
    rows = []
    for factor, outcome in product(board.factors, outcomes):
        found = [next((one for one in board.effects(task, outcome) if one.a == factor), None) for task in board.tasks]
        if any(found):
            rows.append((factor, outcomes[outcome], *(effect_of(one) if one else NONE for one in found)))
    return Table(("factor", "of", *board.tasks), rows)


def effect_of(one: Contrast) -> Number:
    """The difference that a factor makes, with its interval and p."""
    (low, high), difference = one.interval, one.effect.difference
    span = f" ({low:+z.2f} to {high:+z.2f})" if isfinite(high - low) else ""
    p = f"p {equals(one.p)}".replace(" ", "\u00a0")  # on one line, perhaps below the interval
    said = f"{difference:+z.2f}{span}".replace(" ", "\u00a0")
    return Number(said if isnan(one.p) else f"{said}, {p}", difference, {"low": low, "high": high, "p": one.p})


def recall_table(board: Board, budget: int | None) -> Table:
    """One row per mixer with this size of state: its place, its recall on each task, bytes and parameters."""
    tasks = board.tasks
    cells = {(cell.mixer, cell.task): cell for cell in board.cells if cell.budget == budget and cell.scored}
    mixers = dict.fromkeys(mixer for mixer, _ in cells)
    order = sorted(mixers, key=lambda mixer: (board.places.get(mixer, len(board.places) + 1), mixer.casefold()))
    rows = []
    for mixer in order:
        found = [cells.get((mixer, task)) for task in tasks]
        some = next(cell for cell in found if cell)
        began = [value for cell in found if cell for value in cell.values("began")]
        rows.append(
            (
                mixer,
                str(board.places.get(mixer, NONE)),
                *(recall_of(cell) if cell else NONE for cell in found),
                f"{sum(began):.0f} of {len(began)}",
                NONE if some.layer_bytes is None else f"{some.layer_bytes:,}",
                f"{some.parameters:,} ({round(100 * board.parameter_ratio(some) - 100):+d} %)",
            )
        )
    return Table(("mixer", "place", *tasks, "began to learn", "bytes", "parameters (to the median)"), rows)


def recall_of(cell: SuiteCell) -> Number:
    """The mean of a cell with its interval, linked to its runs."""
    low, high = cell.interval
    span = "" if isnan(low) else f" ({low:.2f} to {high:.2f})"
    few = "" if cell.is_complete else f", {plural(len(cell.scored), 'seed')}"
    parts = {"low": low, "high": high, "seeds": len(cell.scored)}
    mark = f" {UNTUNED}" if cell.is_untuned else ""
    return Number(f"{cell.mean:.2f}{span}{few}{mark}", cell.mean, parts, anchor=cell.anchor)


def cell_table(board: Board, speeds: Mapping[str, Sequence[float]]) -> Table:
    """One row per cell, for a CSV file. `speeds` are as in `suite_page`."""
    head = ("mixer", "task", "state_bytes", "layer_bytes", "place", "rate", "seeds", "recall", "low", "high", "began")
    more = ("choosing runs that began", "ms per 1000 tokens")
    milliseconds = {mixer: number(median(found)) for mixer, found in speeds.items()}
    rows = [
        (
            cell.mixer,
            cell.task,
            NONE if cell.budget is None else str(cell.budget),
            NONE if cell.layer_bytes is None else str(cell.layer_bytes),
            str(board.places.get(cell.mixer, NONE)),
            NONE if cell.rate is None else f"{cell.rate:g}",
            str(len(cell.scored)),
            number(cell.mean),
            *(number(end) for end in cell.interval),
            f"{sum(cell.values('began')):.0f}",
            str(cell.began_to_choose),
            milliseconds.get(cell.mixer, NONE),
        )
        for cell in board.cells
        if cell.scored
    ]
    return Table((*head, *more), rows)


def run_table(board: Board) -> Table:
    """One row per run, for pandas and R: settings, both accuracies, and what the run is for."""
    head = ("suite", "protocol", "mixer", "task", "state_bytes", "rate", "seed", "stage", "test", "held_out", "began")
    rows = [
        (
            *(run.settings["suite"]["name"], board.suite.protocol, cell.mixer, cell.task),
            NONE if cell.budget is None else str(cell.budget),
            *(f"{run.lr:g}", str(run.seed), "score" if run in cell.scored else "choose"),
            *(number(run.best.accuracy), number(run.held_out)),
            str(int(run.best.accuracy > board.suite.tasks[cell.task].began)),
            *(str(run.parameters), number(run.seconds), run.device, run.digest),
        )
        for cell in board.cells
        for run in cell.runs
    ]
    return Table((*head, "parameters", "seconds", "device", "digest"), rows)
