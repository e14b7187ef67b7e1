"""rebased report: tables, figures and one page from the records of runs."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.progress import Progress
from rich.text import Text

from rebased.cli.imports import import_user_code
from rebased.cli.terminal import Terminal
from rebased.files import replacing
from rebased.report import Report, Table, check_replaceable, write_page
from rebased.runs.collect import check_bundle_name, collect, distinct, write_bundle

PAGE = Path("report.html")
FORMATS = {".md": Table.to_markdown, ".tex": Table.to_latex, ".csv": Table.to_csv}


def report(
    runs: tuple[Path, ...],
    /,
    *,
    output: Annotated[Path | None, Parameter(name=["--output", "-o"])] = None,
    tables: Path | None = None,
    bundle: Path | None = None,
    replace: Annotated[bool, Parameter(negative="")] = False,
    reference: str | None = None,
    title: str | None = None,
    imports: Annotated[tuple[str, ...], Parameter(name="--import", negative="", show_default=False)] = (),
) -> None:
    """Compute tables, figures and statistics from the records of runs, and write them as one HTML page.

    The runs may be on synthetic tasks, of language models, or both.

    Parameters
    ----------
    runs
        Folders, searched at any depth for record.jsonl and for bundles (*.jsonl.xz, *.jsonl.gz); or such files.
    output
        The page; report.html if nothing else is asked for. An older page is replaced, another file is not.
    tables
        Folder for every table as Markdown, LaTeX and CSV.
    bundle
        Write all records into one compressed file, such as records.jsonl.xz, that `rebased report` reads again.
    replace
        Overwrite files that --tables and --bundle find in their way.
    reference
        The model that the others are compared with, as the page names it; ReBased by default.
    title
        The page's heading; by default it says what the page is about.
    imports
        Python file or module with mixers of your own, which tell the size of their states.
    """
    for name in imports:
        import_user_code(name)
    if output is None and tables is None and bundle is None:
        output = PAGE
    if output:
        check_page_name(output)
    if bundle:
        check_bundle_name(bundle)
        check_free([bundle], replace)
    console = Terminal()
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        reading = progress.add_task("reading", total=None)
        found = collect(runs, lambda done, total: progress.update(reading, completed=done, total=total))
        progress.update(reading, description="computing", total=None)
        result = Report(found, reference)
        files = table_files(result.tables(), tables) if tables else {}
        check_free(list(files), replace)
        if output:
            progress.update(reading, description="drawing")
            write_page(result.page(title, typed(runs, output, reference)), output)
        for path, text in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as file:
                file.write(text.encode())
        if bundle:
            progress.update(reading, description="compressing")
            write_bundle(distinct([*found.runs, *found.lm_runs, *found.others]), bundle)
    for sentence in result.summary:
        console.print(sentence, soft_wrap=True, highlight=False, markup=False)
    for warning in result.warnings:
        line = Text.assemble(("warning:", "yellow"), " ", warning)  # not markup: it may hold brackets
        Terminal(stderr=True).print(line, soft_wrap=True, highlight=False)
    for written in (output, tables, bundle):
        if written:
            console.print(f"wrote {written}", soft_wrap=True, highlight=False, markup=False)


def check_page_name(path: Path) -> None:
    """ValueError if the page's name does not end in .html, or names a file that is not a page."""
    if path.suffix not in (".html", ".htm"):
        raise ValueError(f"-o {path}: the page is HTML, give a name ending in .html; --tables DIR writes other formats")
    check_replaceable(path)


def check_free(paths: list[Path], replace: bool) -> None:
    """ValueError if one of the files exists, unless `replace` is set."""
    taken = [path for path in paths if path.exists()]
    if taken and not replace:
        more = f" and {len(taken) - 1} more" if len(taken) > 1 else ""
        raise ValueError(f"{taken[0]}{more} exist(s) already; add --replace to overwrite, or choose another name")


def table_files(tables: Mapping[str, Table], folder: Path) -> dict[Path, str]:
    """By path, the text of every table in every format."""
    return {
        folder / f"{name}{suffix}": write(table) for name, table in tables.items() for suffix, write in FORMATS.items()
    }


def typed(runs: tuple[Path, ...], output: Path, reference: str | None) -> str:
    """The command that makes the page again."""
    words = ["rebased", "report", *map(str, runs), "-o", str(output)]
    words += ["--reference", reference] if reference else []
    return shlex.join(words)
