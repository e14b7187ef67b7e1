"""rebased lm compare: perplexities of trained language models, beside the paper's Table 2."""

from pathlib import Path

from rich.console import Console

from rebased.cli.rich_table import rich_table
from rebased.report.language_models import compare_language_models
from rebased.runs.collect import collect, is_text


def lm_compare(runs: tuple[Path, ...], /) -> int:
    """Print the perplexities of all, AR and non-AR tokens: means over seeds with intervals, and paired differences.

    The output is a table in a terminal, and Markdown in a file or a pipe.

    Parameters
    ----------
    runs
        Folders of runs, searched at any depth, record.jsonl files, or bundles of them (.jsonl.gz, .jsonl.xz).
    """
    found, console = compare_language_models(collect(runs, wanted=is_text).runs), Console()
    if not console.is_terminal:
        print(found.to_markdown(), end="")
        return 0
    for table in found.tables():
        console.print(rich_table(table), "")
    for remark in found.remarks():
        console.print(f"- {remark}", markup=False, highlight=False)
    return 0
