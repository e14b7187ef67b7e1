"""rebased paper: every table and figure of the paper, ours beside it, with a verdict each."""

import shlex
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.box import SIMPLE_HEAD
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from rebased.cli.output import OUT_OPTION, TO_TERMINAL, Output, say
from rebased.cli.paper_params import print_parameters
from rebased.cli.report import check_page_name
from rebased.cli.rich_table import TerminalTable
from rebased.paper.evidence import read_evidence, shipped_evidence
from rebased.paper.page import PaperPage
from rebased.paper.planned import judge_plan, outcome_table, read_plan
from rebased.report.page import write_page

COLOURS = {"reproduced": "green", "partly": "yellow", "undecided": "cyan", "not reproduced": "red", "not run": "dim"}


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
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        reading = progress.add_task("reading", total=None)
        if records:
            evidence = read_evidence(records, lambda done, total: progress.update(reading, completed=done, total=total))
        else:
            evidence = shipped_evidence()
        progress.update(reading, description="computing", total=None)
        found = PaperPage(evidence)
        if out is not None:
            progress.update(reading, description="drawing")
            words = ["rebased", "paper", *map(str, records), "-o", str(out)]
            write_page(found.page(shlex.join(words)), out)
    for n, sentence in enumerate(found.answers, 1):
        say(results, f"{n}. {sentence}")
    results.print(shown(found))
    say(results, f"{found.counts}. {found.provenance}")
    to.warn(found.warnings)
    if out is not None:
        say(console, f"wrote {out}")
    to.emit(found.to_record() | {"warnings": found.warnings, "wrote": [out] if out else []})
    return 0


def shown(found: PaperPage) -> Table:
    """One row per table and figure: its verdict, and why."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for head, wrap in (("of the paper", False), ("verdict", False), ("why", True)):
        table.add_column(head, no_wrap=not wrap)
    for finding in found.findings:
        table.add_row(finding.item.name, Text(finding.verdict, COLOURS[finding.verdict]), finding.sentence)
    return table
