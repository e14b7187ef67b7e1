"""Records to tables, figures and HTML pages. Nothing here trains or loads weights."""

from rebased.report.demo import demo_page
from rebased.report.page import Page, Section, check_replaceable, write_page
from rebased.report.report import Report
from rebased.report.tables import Table

__all__ = [
    "Page",
    "Report",
    "Section",
    "Table",
    "check_replaceable",
    "demo_page",
    "write_page",
]
