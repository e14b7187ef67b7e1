"""Tables in a terminal: no number is broken, and a row keeps its name."""

import io

import pytest
from rich.console import Console

from rebased.cli.rich_table import TerminalTable, blocks
from rebased.report.tables import Table

TABLE = Table(
    ("model", "D", "accuracy", "accuracy on held-out data", "paper: accuracy"),
    [("ReBased", "64", "0.991 ± 0.010", "0.990 ± 0.011", "0.86"), ("ReBased", "128", "0.994 ± 0.007", "–", "0.99")],
)


def shown(table: Table, width: int) -> list[str]:
    console = Console(width=width, file=io.StringIO())
    with console.capture() as text:
        console.print(TerminalTable(table))
    return [line.rstrip() for line in text.get().splitlines()]


@pytest.mark.parametrize("width", [30, 40, 60, 80])
def test_no_cell_is_broken_and_no_line_is_too_long(width: int) -> None:
    lines = shown(TABLE, width)
    assert all(len(line) <= width for line in lines)
    for model, d_model, *cells in TABLE.rows:
        own = [f"{line} " for line in lines if line.split()[:2] == [model, d_model]]
        assert all(any(f" {cell} " in line for line in own) for cell in cells)


def test_every_block_begins_with_the_columns_that_name_a_row() -> None:
    assert list(blocks(TABLE, 80)) == [[0, 1, 2, 3, 4]]
    assert list(blocks(TABLE, 40)) == [[0, 1, 2], [0, 1, 3, 4]]
    assert list(blocks(Table(("model", "loss"), [("a", "1"), ("b", "2")]), 5)) == [[0, 1]]


def test_a_long_name_goes_on_in_the_next_line() -> None:
    lines = shown(Table(("model", "loss"), [("a mixer with a long name", "0.5")]), 20)
    assert " ".join(line.removesuffix("0.5").strip() for line in lines[2:]) == "a mixer with a long name"


def test_a_table_without_rows_has_a_head() -> None:
    assert shown(Table(("model", "loss"), []), 80)[0] == "model  loss"
