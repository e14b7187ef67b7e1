"""Records to tables, figures and HTML pages. Nothing here trains or loads weights."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rebased.report.page import Page, Section, check_replaceable, write_page
from rebased.report.tables import Table

if TYPE_CHECKING:
    from rebased.report.demo import demo_page
    from rebased.report.report import Report

__all__ = [
    "Page",
    "Report",
    "Section",
    "Table",
    "check_replaceable",
    "demo_page",
    "write_page",
]


def __getattr__(name: str) -> Any:
    """Reports with figures arrive on first use: they need matplotlib, tables do not."""
    home = {"Report": "report", "demo_page": "demo"}.get(name)
    if home is None:
        raise AttributeError(f"module 'rebased.report' has no attribute {name!r}")
    return getattr(import_module(f"rebased.report.{home}"), name)
