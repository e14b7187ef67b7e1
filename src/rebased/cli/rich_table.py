"""The tables of reports in a terminal."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, JustifyMethod, RenderResult
from rich.table import Table as RichTable

from rebased.report.tables import Table

GAP = 2  # spaces between two columns


class TerminalTable(NamedTuple):
    """A report's table for a rich console, as blocks of columns one below the other where the terminal is narrow."""

    table: Table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The blocks, with an empty line between two of them."""
        for n, columns in enumerate(blocks(self.table, options.max_width)):
            if n:
                yield ""
            yield block(self.table, columns, options.max_width)


def block(table: Table, columns: Sequence[int], width: int) -> RichTable:
    """Some columns of a table: names to the left, numbers to the right."""
    least = [least_width(table, column, width) for column in columns]
    spare = width - total_width(least)
    shown = RichTable(box=SIMPLE_HEAD, show_edge=False, padding=(0, GAP - 1, 0, 0))
    for column, narrow in zip(columns, least, strict=True):
        longest = max(map(cell_len, (table.head[column], *(row[column] for row in table.rows))))
        more = max(0, min(longest - narrow, spare))
        spare -= more
        justify: JustifyMethod = "right" if column else "left"
        shown.add_column(table.head[column], justify=justify, width=narrow + more, overflow="fold")
    for row in table.rows:
        shown.add_row(*(row[column] for column in columns))
    return shown


def blocks(table: Table, width: int) -> Iterator[list[int]]:
    """The columns that fit beside each other into so many characters. Each block begins with those that name a row."""
    names = list(range(name_columns(table)))
    columns = list(names)
    for column in range(len(names), len(table.head)):
        wanted = [*columns, column]
        if len(columns) > len(names) and total_width([least_width(table, one, width) for one in wanted]) > width:
            yield columns
            wanted = [*names, column]
        columns = wanted
    yield columns


def name_columns(table: Table) -> int:
    """How many of the first columns name a row: the fewest in which no two rows are equal."""
    for count in range(1, len(table.head)):
        if len({row[:count] for row in table.rows}) == len(table.rows):
            return count
    return 1


def least_width(table: Table, column: int, width: int) -> int:
    """How wide a column must be. A head may be broken between words, and a name that is longer than half of the
    terminal's width; no other cell."""
    words = table.head[column].split()
    longest = max(map(cell_len, (" ", *words, *(row[column] for row in table.rows))))
    return longest if column else min(longest, width // 2)


def total_width(widths: Sequence[int]) -> int:
    """The width of columns beside each other, with the space after the last."""
    return sum(widths) + GAP * len(widths) - 1
