"""rebased report: tables, figures and one page from the records of runs."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from rebased.cli import same_page
from rebased.cli.imports import Imports, import_all
from rebased.cli.output import OUT_OPTION, TO_TERMINAL, Output, progress_bars, say
from rebased.files import replacing
from rebased.paper.reference import PAPER
from rebased.report.drawing import FORMATS as FIGURES
from rebased.report.page import check_replaceable, write_page
from rebased.report.reference_values import read_reference_values
from rebased.report.report import Report
from rebased.report.tables import Table
from rebased.runs.collect import check_bundle_name, collect, distinct, write_bundle

PAGE = Path("report.html")
TABLES: dict[str, Callable[[Table], str]] = {"md": Table.to_markdown, "tex": Table.to_latex, "csv": Table.to_csv}
FORMATS = (*TABLES, *FIGURES)


def report(
    runs: tuple[Path, ...],
    /,
    *,
    out: Annotated[Path | None, OUT_OPTION] = None,
    tables: Path | None = None,
    formats: str = ",".join(FORMATS),
    bundle: Path | None = None,
    replace: Annotated[bool, Parameter(negative="")] = False,
    reference: str | None = None,
    reference_values: Path | None = None,
    title: str | None = None,
    imports: Imports = (),
    to: Output = TO_TERMINAL,
) -> None:
    """Compute tables, figures and statistics from the records of runs, and write them as one HTML page.

    The runs may be on synthetic tasks, of language models, or both.

    Parameters
    ----------
    runs
        Folders, searched at any depth for record.jsonl and for bundles (*.jsonl.xz, *.jsonl.gz); or such files.
    out
        The page; report.html if nothing else is asked for. An older page is replaced, another file is not.
    tables
        Folder for every table as Markdown, LaTeX and CSV, and for every figure as SVG, PNG and PDF.
    formats
        Which of these --tables writes: names separated by commas.
    bundle
        Write all records into one compressed file, such as records.jsonl.xz, that `rebased report` reads again.
    replace
        Overwrite files that --tables and --bundle find in their way.
    reference
        The model that the others are compared with, as the page names it; ReBased by default.
    reference_values
        YAML or JSON file of values to show beside those of the runs, instead of the ReBased paper's. The docstring of
        rebased.report.reference_values describes it.
    title
        The page's heading; by default it says what the page is about.
    imports
        Python file or module with mixers of your own, which tell the size of their states.
    """
    to.check()
    kinds = parse_formats(formats)
    import_all(imports)
    out = out or (None if tables or bundle else PAGE)
    if out:
        check_page_name(out)
    if bundle:
        check_bundle_name(bundle)
        check_free([bundle], replace)
    console = to.console()
    with progress_bars(console) as begin_bar:
        found = collect(runs, begin_bar("reading"))
        begin_bar("computing")
        every = [*found.runs, *found.lm_runs]
        values = read_reference_values(reference_values, every) if reference_values else PAPER
        result = Report(found, reference, values)
        files = files_of(result, tables, kinds) if tables else {}
        check_free(list(files), replace)
        if out:
            write_page(result.page(title, same_page("--tables", "--formats", "--bundle")), out)
        writing = begin_bar("writing")
        for done, (path, content) in enumerate(files.items(), start=1):
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as file:
                file.write(content())
            writing(done, len(files))
        if bundle:
            write_bundle(distinct([*every, *found.others]), bundle)
    for sentence in result.summary:
        say(to.result_console(), sentence)
    to.warn(result.warnings)
    wrote = [path for path in (out, tables, bundle) if path]
    for path in wrote:
        say(console, f"wrote {path}")
    named = {name: table.to_records() for name, table in result.tables().items()}
    to.emit({"summary": result.summary, "warnings": result.warnings, "wrote": wrote, "tables": named})


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


def parse_formats(formats: str) -> list[str]:
    """The formats in a list such as "csv,pdf". ValueError names one that nothing can be written in."""
    kinds = [kind.strip().lower().removeprefix(".") for kind in formats.split(",") if kind.strip()]
    for kind in kinds:
        if kind not in FORMATS:
            known = f"tables are written as {', '.join(TABLES)}, figures as {', '.join(FIGURES)}"
            raise ValueError(f"--formats {kind}: there is no such format here; {known}")
    if not kinds:
        raise ValueError(f"--formats is empty; name some of {', '.join(FORMATS)}")
    return kinds


def files_of(result: Report, folder: Path, kinds: Sequence[str]) -> dict[Path, Callable[[], bytes]]:
    """{path: function that returns the file's bytes} for every table and figure."""
    files: dict[Path, Callable[[], bytes]] = {}
    for name, table in result.tables().items():
        for kind in (kind for kind in TABLES if kind in kinds):
            files[folder / f"{name}.{kind}"] = lambda write=TABLES[kind], of=table: write(of).encode()  # type: ignore
    for name, panels in result.figures().items():
        for figure in (figure for figure in FIGURES if figure in kinds):
            files[folder / f"figure-{name}.{figure}"] = partial(panels.to_file, figure)
    return files
