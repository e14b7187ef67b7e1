"""The records of results/tasks/quick: the page shows them, and each task is learnt by one model and not by another."""

import importlib.util
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "results" / "tasks" / "quick"
_spec = importlib.util.spec_from_file_location("tasks_quick_table", FOLDER / "table.py")
assert _spec is not None
assert _spec.loader is not None
table = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(table)


def test_a_table_replaces_the_one_of_the_page() -> None:
    best = {"needle, noise": {"ReBased": 0.951, "short_conv": 0.1}, "mqar": {"ReBased": 0.4}}
    page = table.with_table("a\n<!-- results/tasks/quick -->\nold\n<!-- end -->\nb", best)
    rows = ["| task | ReBased | short_conv |", "|---|---|---|", "| `mqar` | 0.40 |  |"]
    rows += ["| `needle, noise` | **0.95** | 0.10 |", "", "<!-- end -->", "b"]
    assert page.splitlines() == ["a", "<!-- results/tasks/quick -->", *rows]
    assert table.with_table(page, best) == page


def test_the_page_shows_the_records() -> None:
    """If this fails: python results/tasks/quick/table.py"""
    page = table.PAGE.read_text()
    assert table.with_table(page, table.best_by_task()) == page


def test_each_task_is_learnt_by_one_model_and_not_by_another() -> None:
    for task, accuracies in table.best_by_task().items():
        assert max(accuracies.values()) >= table.LEARNED, f"nobody learns {task}: {accuracies}"
        assert min(accuracies.values()) < table.LEARNED, f"everybody learns {task}: {accuracies}"
