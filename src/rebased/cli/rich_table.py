"""The tables of reports in a terminal."""

from rich.box import SIMPLE_HEAD
from rich.table import Table as RichTable

from rebased.report import Table


def rich_table(table: Table) -> RichTable:
    """Return a report's table for a rich console: the first column to the left, numbers to the right."""
    name, *numbers = table.head
    shown = RichTable(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))  # fits into 80 columns
    shown.add_column(name, overflow="fold")  # in a narrow terminal a name goes on in the next line, whole
    for head in numbers:
        shown.add_column(head, justify="right", overflow="fold")
    for row in table.rows:
        shown.add_row(*row)
    return shown
