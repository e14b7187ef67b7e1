"""rebased paper --params: the paper's parameter counts, ours beside theirs."""

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from rebased.cli.output import Output
from rebased.models import preset
from rebased.paper.counts import (
    SAME_LENGTH,
    STATE_LENGTHS,
    TABLE_4,
    TABLE_9,
    Cell,
    Size,
    count_parameters,
    sizes_at_one_length,
)

TITLES = {4: "Table 4: the MQAR models", 9: "Table 9: the language models"}


def print_parameters(to: Output) -> int:
    """Print Tables 4 and 9 with our counts, and every MQAR model at one length with the size of its state.

    Returns the exit code: 1 if a count differs from the paper's. JSON has every cell, and the sizes at one length.
    """
    ours = {cell: count_parameters(cell.config()) for cell in (*TABLE_4, *TABLE_9)}
    sizes = sizes_at_one_length()
    exact = sum(count == cell.parameters for cell, count in ours.items())
    console = to.result_console()
    for table in (TABLE_4, TABLE_9):
        console.print(_table(table, ours))
    console.print(_size_table(sizes))
    console.print(_notes(), highlight=False)
    verdict = f"all {len(ours)} cells exact" if exact == len(ours) else f"{len(ours) - exact} of {len(ours)} differ"
    console.print(verdict, style="bold green" if exact == len(ours) else "bold red", highlight=False)
    cells = [_record(cell, count) for cell, count in ours.items()]
    to.emit({"cells": cells, "at_one_length": [size._asdict() for size in sizes]})
    return 0 if exact == len(ours) else 1


def _record(cell: Cell, ours: int) -> dict[str, object]:
    shape = {"table": cell.table, "model": cell.model, "d_model": cell.d_model, "positions": cell.positions}
    return {**shape, "preset": cell.preset, "ours": ours, "paper": cell.parameters, "exact": ours == cell.parameters}


def _table(cells: Sequence[Cell], ours: dict[Cell, int]) -> Table:
    table = Table(title=TITLES[cells[0].table], title_justify="left")
    table.add_column("model")
    for name in ("D", "positions", "ours", "paper", ""):
        table.add_column(name, justify="right")
    for cell in cells:
        off = ours[cell] - cell.parameters
        mark = Text("✓", "green") if off == 0 else Text(f"✗ {off:+,}", "red")
        counts = (f"{cell.d_model}", f"{cell.positions}", f"{ours[cell]:,}", f"{cell.parameters:,}")
        table.add_row(cell.model, *counts, mark, end_section=cell.d_model == 512)  # a model's last width
    return table


def _size_table(sizes: Sequence[Size]) -> Table:
    title = f"All at {SAME_LENGTH} positions: parameters, and KiB of state (fp32) by number of tokens"
    table = Table(title=title, title_justify="left", pad_edge=False, collapse_padding=True)
    table.add_column("preset")
    for name in ("D", "parameters", *map(str, STATE_LENGTHS)):
        table.add_column(name, justify="right")
    for size in sizes:
        states = (f"{size.state_bytes[length] / 1024:,.1f}" for length in STATE_LENGTHS)
        table.add_row(size.preset, f"{size.d_model}", f"{size.parameters:,}", *states, end_section=size.d_model == 512)
    return table


def _notes() -> str:
    """Return what a reader needs to know to compute the same numbers."""
    based = count_parameters(preset("lm-paper-text-based"))
    more = count_parameters(preset("lm-paper-text-rebased")) - based
    return (
        "Table 4 mixes runs of different lengths: 'positions' is the number of learned positions in each cell.\n"
        "Based and ReBased have 12 heads; no width of Table 4 divides by 12, so values are 12 x (D // 12) wide.\n"
        "Table 9 has 8 heads with keys of 128 (the released checkpoint); with the text's 12 heads of 16, "
        f"Based has {based:,} and ReBased {more:,} more."
    )
