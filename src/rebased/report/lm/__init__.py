"""Language models over seeds: tables, figures and the part of a page about them."""

from collections.abc import Mapping, Sequence

from rebased.report.lm.models import LanguageModels, compare_language_models
from rebased.report.lm.narrative import remarks
from rebased.report.lm.page import LMReport
from rebased.report.lm.tables import difference_table, distance_table, perplexity_table, task_table, with_interval
from rebased.report.tables import Table

__all__ = [
    "LMReport",
    "LanguageModels",
    "as_markdown",
    "compare_language_models",
    "compare_tables",
    "remarks",
]


def compare_tables(found: LanguageModels, scores: Mapping[str, Mapping[str, float]] | None = None) -> dict[str, Table]:
    """The tables of `rebased lm compare` by name: perplexity by model, the differences if there are several models, AR
    tokens by distance if records have them, and scores on tasks if there are some, by digest and task."""
    tables = {"models": perplexity_table(found, with_interval, always=True)}
    if len(found.models) > 1:
        tables["differences"] = difference_table(found)
    if (distances := distance_table(found, with_interval)) is not None:
        tables["by_distance"] = distances
    if (tasks := task_table(found, scores or {})) is not None:
        tables["tasks"] = tasks
    return tables


def as_markdown(tables: Mapping[str, Table], sentences: Sequence[str]) -> str:
    """Tables with sentences below them as Markdown."""
    lines = "".join(f"- {sentence}\n" for sentence in sentences)
    return "\n".join([*(table.to_markdown() for table in tables.values()), lines])
