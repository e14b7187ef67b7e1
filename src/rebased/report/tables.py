"""Tables as data: a page, a terminal and a file show the same cells."""

import csv
import io
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from math import isfinite, isnan
from typing import TYPE_CHECKING, NamedTuple, Self

if TYPE_CHECKING:
    from rebased.analysis.spread import Spread  # needs scipy, which commands that print a table do without

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


Parts = Mapping[str, float | str | None]


class Number(str):
    """A cell that shows a number. A page shows its text, rounded; a CSV file gets the exact value.

    `parts` are further values in the same cell by what they are, such as {"sd": 0.03} of a mean. They get columns of
    their own in a CSV file.
    """

    values: Mapping[str, float | str]
    anchor: str  # a place on the page that it links to

    def __new__(cls, text: str, value: float | None, parts: Parts | None = None, anchor: str = "") -> Self:
        cell = super().__new__(cls, text)
        cell.values = {what: one for what, one in {"": value, **(parts or {})}.items() if one is not None}
        cell.anchor = anchor
        return cell


class Table(NamedTuple):
    """Cells of text in rows of equal length."""

    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]  # the first cell of a row is its name, the others are numbers
    brief: tuple[str, ...] = ()  # the columns that fit into a column of a paper; all if empty

    def folded(self) -> str:
        """As `to_html`. Columns with one text in all rows are a sentence above the table."""
        columns = [*zip(*self.rows, strict=True)] if len(self.rows) > 1 else []
        same = [i for i, cells in enumerate(columns) if i and len(set(cells)) == 1]
        said = "; ".join(f"{self.head[i]} {columns[i][0]}" for i in same)
        lines = ([cell for i, cell in enumerate(line) if i not in same] for line in (self.head, *self.rows))
        head, *rows = map(tuple, lines)
        return (f"<p>In all rows: {escape(said)}.</p>" if same else "") + Table(head, rows).to_html()

    def to_html(self) -> str:
        """A <table> in a box that scrolls sideways."""
        head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in self.head)
        rows = "".join(
            f'<tr><th scope="row">{escape(name)}</th>{"".join(f"<td>{_to_html(cell)}</td>" for cell in cells)}</tr>'
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
        """A tabular that is at most as wide as a column of text: the brief columns, without those that are empty
        and without words that all rows share."""
        brief, columns = self.brief or self.head, [*zip(*self.rows, strict=True)]
        same = [len(set(cells)) == 1 and not getattr(cells[0], "values", ()) for cells in columns]
        kept = [i for i, name in enumerate(self.head) if name in brief and (i == 0 or not same[i])]
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
        cells = (row[column] for row in self.rows if row[column] not in EMPTY)
        return list(dict.fromkeys(kind for cell in cells for kind in getattr(cell, "values", ("",)))) or [""]


def _to_html(cell: str) -> str:
    anchor = getattr(cell, "anchor", "")
    return f'<a href="#{escape(anchor)}">{escape(cell)}</a>' if anchor else escape(cell)


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


def p_text(p: float) -> str:
    """A p value with three decimals; a dash for nan."""
    return number(p) if isnan(p) or p >= 0.001 else Number("< 0.001", p)


def number(value: float | None, form: str = ".3f") -> Number:
    """A number in this format, three decimals by default; a dash for None and nan."""
    return Number(NONE, None) if value is None or isnan(value) else Number(f"{value:{form}}", value)


def plus_minus(spread: "Spread", digits: int = 3) -> Number:
    """The mean ± the sample standard deviation, which one value alone does not have."""
    form = f".{digits}f"
    if isnan(spread.sd):
        return number(spread.mean, form)
    return Number(f"{spread.mean:{form}} ± {spread.sd:{form}}", spread.mean, {"sd": spread.sd})
