"""rebased probe: where the layers of trained models look, and how near that is to where the answers stand."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console

from rebased.cli import same_page
from rebased.cli.imports import Imports, import_all
from rebased.cli.model_options import Device
from rebased.cli.output import OUT_OPTION, STDOUT, TO_TERMINAL, Output, progress_bars, say, to_json
from rebased.cli.report import ValuesFile, check_page_name, choose_values
from rebased.cli.rich_table import TerminalTable
from rebased.cli.sweep import sweep as train_sweep
from rebased.evaluate.probe_record import EXAMPLES, PROBE, WINDOWS, probe_run, read_lines
from rebased.files import seal
from rebased.ops.backend import choose_device
from rebased.report.page import write_page
from rebased.report.probe.cells import run_of
from rebased.report.probe.files import is_probe_file, read_probes
from rebased.report.probe.page import ProbeReport
from rebased.report.synthetic.cells import build_results
from rebased.runs.finished import Run
from rebased.runs.lm_config import LMRunConfig
from rebased.runs.record import RECORD, read_record


def probe(
    runs: tuple[Path, ...],
    /,
    *,
    out: Annotated[Path | None, OUT_OPTION] = None,
    split: str | None = None,
    examples: int = EXAMPLES,
    windows: int = WINDOWS,
    seq_len: int | None = None,
    data: Path | None = None,
    sweep: Path | None = None,
    reference_values: ValuesFile = None,
    device: Device = "auto",
    imports: Imports = (),
    to: Output = TO_TERMINAL,
) -> int:
    """Compare the attention matrices of trained models with the positions of the answers.

    On a synthetic task the answers are the values that are asked for (soft IoU, as in the paper's Table 3). In text
    they are the tokens that followed the same token before. Each run keeps its result as probe.json, and the page is
    drawn from these files.

    Parameters
    ----------
    runs
        Folders of runs, or of sweeps: of runs that differ in learning rate only, those of the best rate are probed. Or
        files that an earlier probe wrote.
    out
        Write a page with tables, attention maps and similarities, such as probe.html.
    split
        The split to look at. Default: held_out or test of a task, test or valid of a text.
    examples
        Of a synthetic task, look at no more than this many.
    windows
        Of a text, look at this many windows.
    seq_len
        Tokens per window of a text. Default: as in training.
    data
        Prepared text. Default: the one that a run was trained on.
    sweep
        First train this sweep in the folder RUNS, as `rebased sweep FILE --out RUNS` does; what is done is not trained
        again.
    imports
        Python file or module with your own mixers or tasks. Can be given several times.
    """
    to.check()
    if out is not None:
        check_page_name(out)
    import_all(imports)
    if sweep is not None:
        if len(runs) != 1:
            raise ValueError(f"--sweep trains into one folder; give one, such as runs/{sweep.stem}, not {len(runs)}")
        quiet = Output(quiet=to.quiet or to.json == STDOUT)
        if code := train_sweep(sweep, out=runs[0], imports=imports, retry_failed=True, to=quiet):
            return code
    asked: dict[str, Any] = {"split": split, "examples": examples, "windows": windows, "seq_len": seq_len, "data": data}
    records, refused = probe_all(runs, to.console(), device=choose_device(device), **asked)
    report = ProbeReport(records, choose_values(reference_values, [run_of(record) for record in records]))
    report.warnings += [f"left out: {error}" for error in refused]
    show(report, to)
    if out is not None:
        write_page(report.page(same_page()), out)
        say(to.console(), f"wrote {out}")
    to.emit(seal(json.loads(to_json({"type": "probes", "records": records}))))
    return 0


def probe_all(paths: Sequence[Path], console: Console, **asked: Any) -> tuple[list[dict[str, Any]], list[ValueError]]:
    """(the records of all runs, why others have none). Raises the first of these errors if there is no record."""
    records: list[dict[str, Any]] = []
    refused: list[ValueError] = []
    folders = [folder for path in paths for folder in find_runs(path, records, console)]
    with progress_bars(console) as begin_bar:
        overall = begin_bar("runs")
        for n, folder in enumerate(folders):
            overall(n, len(folders))
            try:
                records.append(probe_run(folder, **asked, on_progress=begin_bar(folder.name)))
            except ValueError as error:
                refused.append(error)  # of many runs, some may have no attention matrix
    if refused and not records:
        raise refused[0]
    return records, refused


def show(report: ProbeReport, to: Output) -> None:
    """Print the tables, sentences and warnings of a report."""
    results = to.result_console()
    for name, table in report.tables().items():
        results.print(name, style="bold")
        results.print(TerminalTable(table), "")
    for sentence in report.summary:
        say(results, sentence)
    to.warn(report.warnings)


def find_runs(path: Path, records: list[dict[str, Any]], console: Console) -> list[Path]:
    """The folders of the runs to probe in `path`; records in a file are added to `records` instead."""
    if path.is_file():
        if not is_probe_file(path):
            raise ValueError(
                f"{path} is neither a run's folder nor the record of a probe ({PROBE}, or what --json wrote)"
            )
        records += read_probes(path)
        return []
    if (path / RECORD).is_file():
        read_lines(path)  # a run that cannot be probed is an error if it was named
        return [path]
    if not path.is_dir():
        raise ValueError(f"{path}: there is no such folder; give a run's, or one with runs below it")
    found = {file.parent: read_record(file) for file in sorted(path.rglob(RECORD))}
    runs = [Run(str(folder), lines) for folder, lines in found.items() if lines and lines[0]["type"] == "run"]
    done = [run for run in runs if run.status == "done"]
    if not done:
        raise ValueError(f"{path} has no run that is done ({len(found)} begun); train some, then probe them")
    if len(done) < len(found):
        say(console, f"left out: {len(found) - len(done)} of {len(found)} runs, which have not ended, or diverged")
    chosen = [run for run in done if run.kind is LMRunConfig]
    if synthetic := [run for run in done if run.kind is not LMRunConfig]:
        chosen += [run for cell in build_results(synthetic).cells for run in cell.chosen.values()]
    return [Path(run.folder) for run in chosen]
