"""rebased report: tables, figures and one page from any folders of runs."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console
from rich.progress import Progress

from rebased.cli.imports import import_user_code
from rebased.report import check_replaceable, collect, lab_page, lab_tables, write_bundle, write_page

PAGE = Path("report.html")
FORMATS = {".md": "to_markdown", ".tex": "to_latex", ".csv": "to_csv"}


def report(
    runs: tuple[Path, ...],
    /,
    *,
    output: Annotated[Path | None, Parameter(name=["--output", "-o"])] = None,
    tables: Path | None = None,
    bundle: Path | None = None,
    replace: Annotated[bool, Parameter(negative="")] = False,
    title: str = "What they recall",
    imports: Annotated[tuple[str, ...], Parameter(name="--import", negative="", show_default=False)] = (),
) -> None:
    """Compute tables, figures and statistics from records of runs, and write them as one HTML page.

    Parameters
    ----------
    runs
        Folders, searched at any depth for record.jsonl and for bundles (*.jsonl.xz, *.jsonl.gz); or such files.
    output
        The page, report.html by default. An older page is replaced, any other file is not.
    tables
        Folder for every table as Markdown, LaTeX and CSV.
    bundle
        Write all records into one compressed file, such as records.jsonl.xz, that `rebased report` reads again.
    replace
        Overwrite files that --tables and --bundle find in their way.
    title
        The page's heading.
    imports
        Python file or module with mixers of your own, to know the size of their states.
    """
    for name in imports:
        import_user_code(name)
    if output is None and tables is None and bundle is None:
        output = PAGE
    if output:
        if output.suffix not in (".html", ".htm"):
            raise ValueError(f"-o {output}: the page is HTML, give a name ending in .html; --tables DIR has the others")
        check_replaceable(output)
    if bundle and bundle.exists() and not replace:
        raise ValueError(f"{bundle} exists; add --replace to overwrite it, or choose another name")
    console = Console()
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("reading", total=None)
        found = collect(runs, lambda done, total: progress.update(task, completed=done, total=total))
    written = []
    if output:
        write_page(lab_page(found, title), output)
        written.append(output)
    if tables:
        for name, table in lab_tables(found).items():
            for suffix, method in FORMATS.items():
                path = tables / f"{name}{suffix}"
                if path.exists() and not replace:
                    raise ValueError(f"{path} exists; add --replace to overwrite it, or choose another folder")
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(getattr(table, method)(), encoding="utf-8")
        written.append(tables)
    if bundle:
        write_bundle(found.runs, bundle)
        written.append(bundle)
    for path in written:
        console.print(f"wrote {path}", soft_wrap=True, highlight=False, markup=False)
