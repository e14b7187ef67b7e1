"""rebased lm compare: perplexities of trained language models, beside the paper's Table 2."""

from pathlib import Path

from rebased.cli.rich_table import rich_table
from rebased.cli.terminal import Terminal, plain
from rebased.report.lm import compare_language_models, compare_tables, remarks, to_markdown
from rebased.runs.collect import collect, nothing_found


def lm_compare(runs: tuple[Path, ...], /) -> int:
    """Print the perplexities of all, AR and non-AR tokens: means over seeds with intervals, and paired differences.

    The output is a table in a terminal, and Markdown in a file or a pipe.

    Parameters
    ----------
    runs
        Folders of runs, searched at any depth, record.jsonl files, or bundles of them (.jsonl.gz, .jsonl.xz).
    """
    collection, console = collect(runs), Terminal()
    if not collection.lm_runs:
        raise ValueError(nothing_found(runs, collection, "a language model's run") + "; for those, use rebased report")
    found = compare_language_models(collection.lm_runs)
    if not console.is_terminal:
        print(plain(to_markdown(found)), end="")
        return 0
    for table in compare_tables(found):
        console.print(rich_table(table), "")
    for remark in remarks(found):
        console.print(f"- {remark}", markup=False, highlight=False)
    return 0
