"""Records to tables, figures and HTML pages. Nothing here trains or loads weights."""

from rebased.report.demo import demo_page
from rebased.report.figures import epochs_until, learning_curves, state_growth
from rebased.report.page import Page, Section, check_replaceable, write_page
from rebased.report.report import Report
from rebased.report.tables import Table, accuracy_by_pairs, epochs_by_seed, summary

__all__ = [
    "Page",
    "Report",
    "Section",
    "Table",
    "accuracy_by_pairs",
    "check_replaceable",
    "demo_page",
    "epochs_by_seed",
    "epochs_until",
    "learning_curves",
    "state_growth",
    "summary",
    "write_page",
]
