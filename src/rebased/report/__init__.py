"""Records to tables, figures and one HTML page. Nothing here trains, and no weights are loaded."""

from rebased.report.collect import Collection, check_bundle_name, collect, write_bundle
from rebased.report.demo import demo_page
from rebased.report.figures import epochs_until, learning_curves, state_growth
from rebased.report.lab import Lab
from rebased.report.page import Page, Section, check_replaceable, write_page
from rebased.report.runs import Run, by_model, read_run
from rebased.report.tables import Table, accuracy_by_pairs, epochs_by_seed, summary

__all__ = [
    "Collection",
    "Lab",
    "Page",
    "Run",
    "Section",
    "Table",
    "accuracy_by_pairs",
    "by_model",
    "check_bundle_name",
    "check_replaceable",
    "collect",
    "demo_page",
    "epochs_by_seed",
    "epochs_until",
    "learning_curves",
    "read_run",
    "state_growth",
    "summary",
    "write_bundle",
    "write_page",
]
