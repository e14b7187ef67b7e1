"""Write the table of docs/tasks.md: the best test accuracy of each model on each task, over the rates of the bundle.

python results/tasks/quick/table.py
"""

import re
from pathlib import Path

from rebased.runs.collect import collect
from rebased.runs.finished import Run

BUNDLE = Path(__file__).with_name("tasks-quick.jsonl.gz")
PAGE = Path(__file__).parents[3] / "docs" / "tasks.md"
LEARNED = 0.9


def name_of(run: Run) -> str:
    """The name of a run's task, with what else tells tasks of one name apart."""
    task = run.settings["task"]
    return run.task + "".join(f", {task[key]}" for key in ("haystack", "group") if key in task)


def model_of(run: Run) -> str:
    """The kind of a run's model. The delta rule whose beta reaches 2 is told apart."""
    negative = run.settings["model"]["mixers"][-1].get("negative")
    return run.model + (", β < 2" if negative else "")


def best_by_task(bundle: Path = BUNDLE) -> dict[str, dict[str, float]]:
    """{task: {model: best accuracy}}, in the order of the sweep."""
    found: dict[str, dict[str, float]] = {}
    for run in collect([bundle]).runs:
        models = found.setdefault(name_of(run), {})
        models[model_of(run)] = max(models.get(model_of(run), 0.0), run.best.accuracy)
    return found


def cell(accuracy: float) -> str:
    """An accuracy, in bold where the task was learned."""
    return f"**{accuracy:.2f}**" if accuracy >= LEARNED else f"{accuracy:.2f}"


def table(best: dict[str, dict[str, float]]) -> str:
    """Markdown: one row per task, one column per model, what was learned in bold."""
    models = sorted({model for row in best.values() for model in row})
    lines = [f"| task | {' | '.join(models)} |", f"|---|{'---|' * len(models)}"]
    for task, row in sorted(best.items()):
        cells = [cell(row[model]) if model in row else "" for model in models]
        lines.append(f"| `{task}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def with_table(page: str, best: dict[str, dict[str, float]]) -> str:
    """The page with this table in the place of the one that it has."""
    begin, end = "<!-- results/tasks/quick -->\n", "<!-- end -->"
    return re.sub(f"(?<={begin}).*?(?={end})", lambda _: f"{table(best)}\n\n", page, flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(), best_by_task()))
