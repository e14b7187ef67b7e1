"""Records to tables, figures and one HTML page. Nothing here trains, and no weights are loaded."""

from rebased.report.demo import demo_page
from rebased.report.figures import epochs_until, learning_curves, state_growth
from rebased.report.page import Page, Section, check_replaceable, write_page
from rebased.report.synthetic import Lab
from rebased.report.tables import Table, accuracy_by_pairs, epochs_by_seed, summary

__all__ = [
    "Lab",
    "Page",
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
