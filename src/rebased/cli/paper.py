"""rebased paper: every table and figure of the paper, ours beside it, with a verdict each."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.box import SIMPLE_HEAD
from rich.table import Table as RichTable
from rich.text import Text

from rebased.cli import same_page
from rebased.cli.output import OUT_OPTION, TO_TERMINAL, Output, progress_bars, say
from rebased.cli.report import check_page_name
from rebased.cli.rich_table import TerminalTable
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
from rebased.paper.evidence import read_evidence, shipped_evidence
from rebased.paper.page import PaperPage
from rebased.paper.plan_file import read_plan
from rebased.paper.planned import judge_plan, outcome_table
from rebased.report.page import write_page
from rebased.report.tables import Table

COLOURS = {"reproduced": "green", "partly": "yellow", "in small part": "yellow"}
COLOURS |= {"undecided": "cyan", "not reproduced": "red", "not run": "dim", "shared": "dim"}


def paper(
    records: tuple[Path, ...] = (),
    /,
    *,
    out: Annotated[Path | None, OUT_OPTION] = None,
    params: Annotated[bool, Parameter(negative="")] = False,
    plan: Path | None = None,
    to: Output = TO_TERMINAL,
) -> int:
    """Hold every table and figure of the paper against records, and say whether it is reproduced.

    Without -o a table in the terminal.

    Parameters
    ----------
    records
        Your own records instead of those that come with the package: bundles (*.jsonl.xz, *.jsonl.gz), folders of runs,
        and files that `rebased probe --json` wrote.
    out
        Write a page with all numbers, tests and figures, such as paper.html. An older page is replaced, another file is
        not.
    params
        Instead print the parameter counts of Tables 4 and 9 beside ours, and the sizes of all MQAR models at one
        length. The exit code is 1 if a count differs.
    plan
        Instead judge RECORDS by a plan that was committed before the runs, such as results/table1-new-seeds/plan.md.
    """
    to.check()
    if params:
        if records or out:
            raise ValueError("--params counts parameters and reads no records; leave out RECORDS and -o")
        return print_parameters(to)
    if plan is not None:
        outcomes = judge_plan(read_plan(plan), read_evidence(records or [plan.parent]))
        to.result_console().print(TerminalTable(outcome_table(outcomes)))
        to.emit({"outcomes": [found.to_record() for found in outcomes]})
        return 0
    if out is not None:
        check_page_name(out)
    console, results = to.console(), to.result_console()
    with progress_bars(console) as begin_bar:
        reading = begin_bar("reading")
        evidence = read_evidence(records, reading) if records else shipped_evidence()
        begin_bar("computing")
        found = PaperPage(evidence)
        if out is not None:
            write_page(found.page(same_page()), out)
    for n, sentence in enumerate(found.answers, 1):
        say(results, f"{n}. {sentence}")
    results.print(shown(found))
    say(results, f"{found.counts}. {found.provenance}")
    to.warn(found.warnings)
    if out is not None:
        say(console, f"wrote {out}")
    to.emit(found.to_record() | {"warnings": found.warnings, "wrote": [out] if out else []})
    return 0


def shown(found: PaperPage) -> RichTable:
    """One row per table and figure: its verdict, and why."""
    table = RichTable(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for head, wrap in (("of the paper", False), ("verdict", False), ("why", True)):
        table.add_column(head, no_wrap=not wrap)
    for finding in found.findings:
        table.add_row(finding.name, Text(finding.verdict, COLOURS[finding.verdict]), finding.sentence)
    return table


def print_parameters(to: Output) -> int:
    """Print Tables 4 and 9 with our counts, and every MQAR model at one length with the size of its state.

    Returns the exit code: 1 if a count differs from the paper's. JSON has every cell, and the sizes at one length.
    """
    ours = {cell: count_parameters(cell.config()) for cell in (*TABLE_4, *TABLE_9)}
    sizes = sizes_at_one_length()
    wrong = sum(count != cell.parameters for cell, count in ours.items())
    console = to.result_console()
    for title, table in (
        ("Table 4: the MQAR models", count_table(TABLE_4, ours)),
        ("Table 9: the language models", count_table(TABLE_9, ours)),
        (f"All at {SAME_LENGTH} positions: parameters, and KiB of state (fp32) by number of tokens", size_table(sizes)),
    ):
        console.print(title, style="bold", highlight=False)
        console.print(TerminalTable(table), "")
    say(console, notes())
    verdict = f"{wrong} of {len(ours)} differ" if wrong else f"all {len(ours)} cells exact"
    console.print(verdict, style="bold red" if wrong else "bold green", highlight=False)
    cells = []
    for cell, count in ours.items():
        about = cell._asdict()
        papers = about.pop("parameters")
        cells.append({**about, "ours": count, "paper": papers, "exact": count == papers})
    to.emit({"cells": cells, "at_one_length": [size._asdict() for size in sizes]})
    return 1 if wrong else 0


def count_table(cells: Sequence[Cell], ours: dict[Cell, int]) -> Table:
    """Our counts beside the paper's."""
    rows = []
    for cell in cells:
        off = ours[cell] - cell.parameters
        counts = (f"{ours[cell]:,}", f"{cell.parameters:,}", f"✗ {off:+,}" if off else "✓")
        rows.append((cell.model, f"{cell.d_model}", f"{cell.positions}", *counts))
    return Table(("model", "D", "positions", "ours", "paper", ""), rows)


def size_table(sizes: Sequence[Size]) -> Table:
    """Parameters and states of all models at one length."""
    rows = []
    for size in sizes:
        states = (f"{size.state_bytes[length] / 1024:,.1f}" for length in STATE_LENGTHS)
        rows.append((size.preset, f"{size.d_model}", f"{size.parameters:,}", *states))
    return Table(("preset", "D", "parameters", *map(str, STATE_LENGTHS)), rows)


def notes() -> str:
    """What a reader needs to know to compute the same numbers."""
    based = count_parameters(preset("lm-paper-text-based"))
    more = count_parameters(preset("lm-paper-text-rebased")) - based
    return (
        "Table 4 mixes runs of different lengths: 'positions' is the number of learned positions in each cell.\n"
        "Based and ReBased have 12 heads; no width of Table 4 divides by 12, so values are 12 x (D // 12) wide.\n"
        "Table 9 has 8 heads with keys of 128 (the released checkpoint); with the text's 12 heads of 16, "
        f"Based has {based:,} and ReBased {more:,} more."
    )
