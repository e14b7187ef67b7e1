"""rebased lm compare: perplexities of trained language models, beside the paper's Table 2."""

from pathlib import Path

from rebased.cli.output import TO_TERMINAL, Output
from rebased.cli.rich_table import rich_table
from rebased.cli.terminal import plain
from rebased.report.lm import compare_language_models, compare_tables, remarks, to_markdown
from rebased.runs.collect import collect, nothing_found


def lm_compare(runs: tuple[Path, ...], /, *, to: Output = TO_TERMINAL) -> int:
    """Print the perplexities of all, AR and non-AR tokens: means over seeds with intervals, and paired differences.

    The output is a table in a terminal, and Markdown in a file or a pipe.

    Parameters
    ----------
    runs
        Folders of runs, searched at any depth, record.jsonl files, or bundles of them (.jsonl.gz, .jsonl.xz).
    """
    to.check()
    collection, console = collect(runs), to.result_console()
    if not collection.lm_runs:
        raise ValueError(nothing_found(runs, collection, "a language model's run") + "; for those, use rebased report")
    found = compare_language_models(collection.lm_runs)
    if console.is_terminal:
        for table in compare_tables(found):
            console.print(rich_table(table), "")
        for remark in remarks(found):
            console.print(f"- {remark}", markup=False, highlight=False)
    else:
        console.out(plain(to_markdown(found)), end="", highlight=False)
    names = ("models", "differences")
    tables = {name: table.to_records() for name, table in zip(names, compare_tables(found), strict=False)}
    to.emit({"split": found.split, "data": found.data, **tables, "remarks": remarks(found)})
    return 0
