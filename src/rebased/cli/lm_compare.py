"""rebased lm compare: perplexities of trained language models, beside what others report for them."""

from pathlib import Path

from rebased.cli.output import TO_TERMINAL, Output
from rebased.cli.report import ValuesFile, choose_values
from rebased.cli.rich_table import TerminalTable
from rebased.config import plain, plural
from rebased.report.lm.models import compare_language_models
from rebased.report.lm.narrative import remarks
from rebased.report.lm.tables import as_markdown, compare_tables
from rebased.runs.collect import collect, nothing_found
from rebased.runs.evaluations import collect_task_scores


def lm_compare(runs: tuple[Path, ...], /, *, reference_values: ValuesFile = None, to: Output = TO_TERMINAL) -> int:
    """Print the perplexities of all, AR and non-AR tokens: means over seeds with intervals, and paired differences.

    Then come AR tokens by distance, if the records have them, and the scores that `rebased lm eval --tasks` has kept in
    the runs' folders. The output is a table in a terminal, and Markdown in a file or a pipe.

    Parameters
    ----------
    runs
        Folders of runs, searched at any depth, record.jsonl files, or bundles of them (.jsonl.gz, .jsonl.xz).
    """
    to.check()
    collection, console = collect(runs), to.result_console()
    if not collection.lm_runs:
        raise ValueError(nothing_found(runs, collection, "a language model's run") + "; for those, use rebased report")
    known = choose_values(reference_values, collection.lm_runs)
    found, scores = compare_language_models(collection.lm_runs, known), collect_task_scores(runs)
    tables, notes = compare_tables(found, scores), remarks(found)
    if collection.runs:
        notes.append(
            f"Left out, no language models: {plural(len(collection.runs), 'run')}. For those, use rebased report."
        )
    if console.is_terminal:
        for table in tables.values():
            console.print(TerminalTable(table), "")
        for remark in notes:
            console.print(f"- {remark}", markup=False, highlight=False)
    else:
        console.out(plain(as_markdown(tables, notes)), end="", highlight=False)
    records = {name: table.to_records() for name, table in tables.items()}
    to.emit({"split": found.split, "data": found.data, **records, "remarks": notes})
    return 0
