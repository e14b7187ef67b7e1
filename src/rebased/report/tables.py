"""Tables as data: a page, a terminal and a file show the same cells."""

import csv
import io
import re
from collections.abc import Sequence
from html import escape
from math import inf, isnan
from statistics import mean
from typing import NamedTuple

from rebased.runs.finished import Run, by_model

LATEX = {"\\": r"\textbackslash{}"} | {sign: rf"\{sign}" for sign in "&%$#_{}"} | {
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "γ": r"$\gamma$", "β": r"$\beta$",
    "²": "$^2$", "−": "$-$", "≥": r"$\ge$", "→": r"$\to$", "–": "--", "×": r"$\times$", "<": "$<$", ">": "$>$",
}  # fmt: skip
NONE = "–"  # an empty cell
FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")  # how a cell begins that a spreadsheet computes
NUMERIC = re.compile(r"[-+]?(\d[\d.,]*(e[-+]?\d+)?)?( ?[%±(–to) ]+[-+]?\d[\d.,]*)*[%)]*")
"""A number, a range ("-0.1 to +0.2") or a dash: what begins with a sign and is none of these is text."""


class Table(NamedTuple):
    """Cells of text in rows of equal length."""

    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]  # the first cell of a row is its name, the others are numbers

    def to_html(self) -> str:
        """A <table> in a box that scrolls sideways."""
        head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in self.head)
        rows = "".join(
            f'<tr><th scope="row">{escape(name)}</th>' + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"
            for name, *cells in self.rows
        )
        return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'

    def to_markdown(self) -> str:
        """A table as GitHub renders it."""
        rule = ["---"] + ["---:"] * (len(self.head) - 1)
        lines = [self.head, rule, *self.rows]
        return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)

    def to_latex(self) -> str:
        """A tabular for \\usepackage{booktabs}."""
        head, *rows = (
            f"{' & '.join(''.join(LATEX.get(sign, sign) for sign in cell) for cell in line)} \\\\\n"
            for line in (self.head, *self.rows)
        )
        columns = "l" + "r" * (len(self.head) - 1)
        body = f"\\toprule\n{head}\\midrule\n{''.join(rows)}\\bottomrule\n"
        return f"\\begin{{tabular}}{{{columns}}}\n{body}\\end{{tabular}}\n"

    def to_csv(self) -> str:
        """Comma-separated values with one line per row, the head first.

        A text that a spreadsheet would compute as a formula gets an apostrophe before it; numbers stay as they are.
        """
        file = io.StringIO()
        lines = ([_no_formula(cell) for cell in line] for line in (self.head, *self.rows))
        csv.writer(file, lineterminator="\n").writerows(lines)
        return file.getvalue()


def _no_formula(cell: str) -> str:
    return f"'{cell}" if cell.startswith(FORMULA) and not NUMERIC.fullmatch(cell) else cell


def summary(runs: Sequence[Run], mark: float) -> Table:
    """One row per model: epochs until accuracy `mark`, best accuracy, parameters, state and time.

    Epochs are the median over runs, and the range. The median is ">N" if half of the runs did not reach `mark` in N.
    """
    length = max(run.seq_len for run in runs)
    head = ("model", f"epochs to {mark:g}", "accuracy", "parameters", f"state, T = {length}", "with T", "time")
    rows = []
    for model, group in by_model(runs).items():
        state, later = group[0].state_bytes(length), group[0].state_bytes(2 * length)
        grows = "-" if state is None else "constant" if state == later else "grows"
        rows.append(
            (
                model,
                epochs_spread(group, mark),
                spread([run.reported.accuracy for run in group]),
                f"{group[0].parameters:,}",
                "-" if state is None else f"{state:,} B",
                grows,
                f"{mean(run.seconds for run in group):.0f} s",
            )
        )
    return Table(head, rows)


def epochs_by_seed(runs: Sequence[Run], mark: float) -> Table:
    """One row per model: the epoch in which each seed's run first had accuracy `mark`; ">N" if not in N epochs.

    Then one row per model but the first: by how many epochs it was later than the first model with the same seed.
    """
    seeds = sorted({run.seed for run in runs})
    by_seed = {model: {run.seed: run for run in group} for model, group in by_model(runs).items()}
    (first, base), *others = by_seed.items()
    rows = [
        (model, *(epochs_cell(group[seed], mark) if seed in group else "-" for seed in seeds))
        for model, group in by_seed.items()
    ]
    rows += [
        (f"{model} − {first}", *(difference_cell(group.get(seed), base.get(seed), mark) for seed in seeds))
        for model, group in others
    ]
    return Table(("model", *(f"seed {seed}" for seed in seeds)), rows)


def difference_cell(run: Run | None, base: Run | None, mark: float) -> str:
    """How many epochs later than `base` this run had accuracy `mark`: at least so many if it ended without it."""
    if run is None or base is None:
        return "-"
    own, other = run.epochs_until(mark), base.epochs_until(mark)
    if own and other:
        return f"{own - other:+d}".replace("-", "−") if own != other else "0"
    if other:
        return f">{len(run.epochs) - other:+d}".replace("-", "−")
    return f"<{own - len(base.epochs):+d}".replace("-", "−") if own else "-"


def epochs_cell(run: Run, mark: float) -> str:
    """The epochs until accuracy `mark`: "7", or ">10" if it was not reached within 10 epochs."""
    reached = run.epochs_until(mark)
    return f">{len(run.epochs)}" if reached is None else str(reached)


def epochs_spread(group: Sequence[Run], mark: float) -> str:
    """The median of the epochs until accuracy `mark`, and the range; of an even number of runs the larger middle one,
    so that it is the epoch of a run."""
    ordered = sorted(group, key=lambda run: (run.epochs_until(mark) or inf, len(run.epochs)))
    low, middle, high = (epochs_cell(run, mark) for run in (ordered[0], ordered[len(ordered) // 2], ordered[-1]))
    return middle if len(group) == 1 else f"{middle} ({low} to {high})"


def accuracy_by_pairs(runs: Sequence[Run]) -> Table | None:
    """Test accuracy by number of pairs, at each run's reported epoch. None where all examples hold equally many."""
    pairs = sorted({int(key) for run in runs for key in run.epochs[0]["test"].get("by_pairs", {})})
    if len(pairs) < 2:
        return None
    rows = []
    for model, group in by_model(runs).items():
        slices = [run.best_epoch["test"]["by_pairs"] for run in group if run.best_epoch]
        rows.append((model, *(spread([part[str(n)] for part in slices if str(n) in part]) for n in pairs)))
    return Table(("model", *(f"{n} pairs" for n in pairs)), rows)


def spread(values: Sequence[float]) -> str:
    """The mean, and between which values the seeds lie."""
    if not values:
        return "-"
    if len(values) == 1:
        return f"{values[0]:.3f}"
    return f"{mean(values):.3f} ({min(values):.3f}–{max(values):.3f})"


def p_text(p: float) -> str:
    """A p value with three decimals; a dash for nan."""
    if isnan(p):
        return NONE
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def number(value: float, sign: str = "") -> str:
    """Three decimals, with `sign` "+" always signed; a dash for nan."""
    return NONE if isnan(value) else f"{value:{sign}.3f}"
