"""Language models over seeds: tables, figures and the part of a page about them."""

from rebased.report.lm.models import LanguageModels, compare_language_models
from rebased.report.lm.narrative import remarks
from rebased.report.lm.page import LMReport
from rebased.report.lm.tables import difference_table, interval_table
from rebased.report.tables import Table

__all__ = ["LMReport", "LanguageModels", "compare_language_models", "compare_tables", "remarks", "to_markdown"]


def compare_tables(found: LanguageModels) -> list[Table]:
    """The tables of `rebased lm compare`: perplexity by model, and the differences if there are several models."""
    return [interval_table(found), difference_table(found)] if len(found.models) > 1 else [interval_table(found)]


def to_markdown(found: LanguageModels) -> str:
    """The tables and remarks of `rebased lm compare` as Markdown."""
    tables = [table.to_markdown() for table in compare_tables(found)]
    return "\n".join([*tables, "".join(f"- {remark}\n" for remark in remarks(found))])
