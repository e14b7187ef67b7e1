"""rebased lm compare: trained language models beside each other and the paper's Table 2, as Markdown."""

from pathlib import Path

from rebased.report.collect import collect, is_text
from rebased.report.language_models import compare_language_models


def lm_compare(runs: tuple[Path, ...], /) -> int:
    """Print perplexities of all, AR and non-AR tokens: means over seeds with intervals, and paired differences.

    Parameters
    ----------
    runs
        Folders of runs, searched at any depth, record.jsonl files, or bundles of them (.jsonl.gz, .jsonl.xz).
    """
    print(compare_language_models(collect(runs, wanted=is_text).runs).to_markdown(), end="")
    return 0
