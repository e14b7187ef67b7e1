"""Tables as data: a page, a terminal and a file show the same cells."""

import csv
import io
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from math import inf, isfinite, isnan
from statistics import mean
from typing import NamedTuple, Self

from rebased.analysis import Spread
from rebased.runs.finished import Run, by_model

LATEX = {"\\": r"\textbackslash{}"} | {sign: rf"\{sign}" for sign in "&%$#_{}"} | {
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "γ": r"$\gamma$", "β": r"$\beta$",
    "²": "$^2$", "−": "$-$", "≥": r"$\ge$", "→": r"$\to$", "–": "--", "×": r"$\times$", "<": "$<$", ">": "$>$",
}  # fmt: skip
NONE = "–"  # an empty cell
FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")  # how a cell begins that a spreadsheet computes
NUMERIC = re.compile(r"[-+]?(\d[\d.,]*(e[-+]?\d+)?)?( ?[%±(–to) ]+[-+]?\d[\d.,]*)*[%)]*")
"""A number, a range ("-0.1 to +0.2") or a dash. Other text may begin with a sign, too."""
EMPTY = (NONE, "-")
MANY = 10  # more columns than this are printed in smaller letters


class Number(str):
    """A cell that shows a number. A page shows its text, rounded; a CSV file gets the exact value.

    `parts` are further values in the same cell by what they are, such as {"sd": 0.03} of a mean. They get columns of
    their own in a CSV file.
    """

    values: Mapping[str, float | str | None]

    def __new__(cls, text: str, value: float | None, parts: Mapping[str, float | str | None] | None = None) -> Self:
        cell = super().__new__(cls, text)
        known = {"": value, **(parts or {})}
        cell.values = {what: one for what, one in known.items() if one is not None}
        return cell


class Table(NamedTuple):
    """Cells of text in rows of equal length."""

    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]  # the first cell of a row is its name, the others are numbers
    brief: tuple[str, ...] = ()  # the columns that fit into a column of a paper; all if empty

    def to_html(self) -> str:
        """A <table> in a box that scrolls sideways."""
        head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in self.head)
        rows = "".join(
            f'<tr><th scope="row">{escape(name)}</th>' + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"
            for name, *cells in self.rows
        )
        many = ' class="many"' if len(self.head) > MANY else ""
        return f'<div class="wide"><table{many}><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'

    def to_markdown(self) -> str:
        """A table as GitHub renders it."""
        rule = ["---"] + ["---:"] * (len(self.head) - 1)
        lines = ([_one_line(cell).replace("|", r"\|") for cell in line] for line in (self.head, rule, *self.rows))
        return "".join(f"| {' | '.join(line)} |\n" for line in lines)

    def to_latex(self) -> str:
        """A tabular that is at most as wide as a column of text: the brief columns, without those that are empty."""
        kept = [
            i
            for i, name in enumerate(self.head)
            if (not self.brief or name in self.brief) and any(row[i] not in EMPTY for row in self.rows)
        ]
        head, *rows = (
            f"{' & '.join(''.join(LATEX.get(sign, sign) for sign in _one_line(line[i])) for i in kept)} \\\\\n"
            for line in (self.head, *self.rows)
        )
        body = f"\\toprule\n{head}\\midrule\n{''.join(rows)}\\bottomrule\n"
        return (
            "% \\usepackage{booktabs,adjustbox}\n\\begin{adjustbox}{max width=\\columnwidth}\n"
            f"\\begin{{tabular}}{{{'l' + 'r' * (len(kept) - 1)}}}\n{body}\\end{{tabular}}\n\\end{{adjustbox}}\n"
        )

    def to_csv(self) -> str:
        """Comma-separated values with one line per row, the head first: exact numbers, each in a column of its own, and
        nothing where a value is missing.

        A text that a spreadsheet would compute as a formula gets an apostrophe before it; numbers stay as they are.
        """
        file = io.StringIO()
        writer = csv.writer(file, lineterminator="\n")
        lines: list[Sequence[object]] = [self._exact_head(), *self._exact_rows()]
        writer.writerows([_no_formula(cell) for cell in line] for line in lines)
        return file.getvalue()

    def to_records(self) -> list[dict[str, object]]:
        """One dict per row by the column's name, as in a CSV file; None where a value is missing."""
        return [dict(zip(self._exact_head(), row, strict=True)) for row in self._exact_rows()]

    def _exact_head(self) -> list[str]:
        counts = Counter(self.head)
        names = [f"{self.head[i - 1]} {name}" if counts[name] > 1 else name for i, name in enumerate(self.head)]
        return [
            f"{name.split(':')[0]} {kind}" if kind else name for i, name in enumerate(names) for kind in self._kinds(i)
        ]

    def _exact_rows(self) -> list[list[object]]:
        kinds = [self._kinds(i) for i in range(len(self.head))]
        return [
            [exact(cell, kind) for cell, some in zip(row, kinds, strict=True) for kind in some] for row in self.rows
        ]

    def _kinds(self, column: int) -> list[str]:
        """What the cells of a column hold: "" for the value itself, then the other parts."""
        cells = [row[column] for row in self.rows if row[column] not in EMPTY]
        kinds = dict.fromkeys(kind for cell in cells for kind in getattr(cell, "values", ("",)))
        return list(kinds) or [""]


def exact(cell: str, kind: str) -> object:
    """The value of a cell for a CSV file; None, an empty field, where there is none."""
    if isinstance(cell, Number):
        value = cell.values.get(kind)
        return None if isinstance(value, float) and not isfinite(value) else value
    return None if kind or cell in EMPTY else cell


def _one_line(cell: str) -> str:
    return cell if cell.isprintable() else " ".join(cell.split())


def _no_formula(cell: object) -> object:
    is_formula = isinstance(cell, str) and cell.startswith(FORMULA) and not NUMERIC.fullmatch(cell)
    return f"'{cell}" if is_formula else cell


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
    return number(p) if isnan(p) or p >= 0.001 else Number("< 0.001", p)


def number(value: float | None, form: str = ".3f") -> Number:
    """A number in this format, three decimals by default; a dash for None and nan."""
    return Number(NONE, None) if value is None or isnan(value) else Number(f"{value:{form}}", value)


def plus_minus(spread: Spread, digits: int = 3) -> Number:
    """The mean ± the sample standard deviation, which one value alone does not have."""
    form = f".{digits}f"
    if isnan(spread.sd):
        return number(spread.mean, form)
    return Number(f"{spread.mean:{form}} ± {spread.sd:{form}}", spread.mean, {"sd": spread.sd})
