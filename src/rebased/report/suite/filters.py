"""Filters of a suite's page, by task, mixer and size of state: CSS alone, so they work without a script.

A chosen radio button hides what belongs to other choices. Without :has() in a browser the page shows everything.
"""

from collections.abc import Mapping
from html import escape

from rebased.report.suite.board import Board
from rebased.report.tables import Table

BEFORE = 2  # columns of a table before those of the tasks
STYLE = """.filters { display: flex; flex-wrap: wrap; gap: .3rem 2rem; }
.filters fieldset { border: 0; margin: 0; padding: 0; font-size: .92rem; }
.filters legend { float: left; padding: 0; margin-right: .7rem; color: var(--faint); }
.by-task td { white-space: normal; }
.filters label { margin-right: .7rem; white-space: nowrap; }
@media print { .filters, section:has(> .filters) { display: none; } }
"""
"""The legend stands before its buttons."""


def by_task(table: Table) -> str:
    """A table with one column per task, of which a filter can show one."""
    return f'<div class="by-task">{table.to_html()}</div>'


def filters(board: Board) -> str:
    """The radio buttons and their rules."""
    choices = {"task": by_tasks(board), "mixers": by_factors(board), "state": by_sizes(board)}
    rules, fields = [], []
    for name, options in choices.items():
        buttons = [f'<label><input type="radio" name="{name}" id="{name}-all" checked> all</label>']
        for i, (option, hidden) in enumerate(options.items()):
            one = f"{name}-{i}"
            buttons.append(f'<label><input type="radio" name="{name}" id="{one}"> {escape(option)}</label>')
            rules.append(f"body:has(#{one}:checked) :is({', '.join(hidden)}) {{ display: none; }}\n")
        if len(options) > 1:
            fields.append(f"<fieldset><legend>{name}</legend>{' '.join(buttons)}</fieldset>")
    return f'<style>{STYLE}{"".join(rules)}</style><form class="filters">{"".join(fields)}</form>'


def by_tasks(board: Board) -> Mapping[str, list[str]]:
    """By task: selectors of what belongs to other tasks, which are panels, columns and runs."""
    columns = f":nth-child(n+{BEFORE + 1}):nth-child(-n+{BEFORE + len(board.tasks)})"
    return {
        task: [
            f':is([data-name="recall-by-bytes"], [data-name="effects"]) .panel:not(:nth-child({t + 1}))',
            f".by-task :is(th, td){columns}:not(:nth-child({BEFORE + 1 + t}))",
            f".runs:not(.task-{list(board.suite.tasks).index(task)})",
        ]
        for t, task in enumerate(board.tasks)
    }


def by_factors(board: Board) -> Mapping[str, list[str]]:
    """By factor: selectors of what belongs to mixers without it, which are lines and dots, rows and runs. The reader's
    own mixers are always shown."""
    factors = {name: mixer.factors for name, mixer in board.suite.mixers.items() if mixer.factors}
    shown = {f"with {factor}": [name for name in factors if factors[name].get(factor)] for factor in board.factors}
    shown |= {"others": [name for name in board.mixers if name not in factors]} if factors else {}
    return {
        option: [
            f'.of-{m}, tr:has(a[href^="#runs-{m}-"])'
            for m, name in enumerate(board.mixers)
            if name not in (*names, *board.own)
        ]
        for option, names in shown.items()
    }


def by_sizes(board: Board) -> Mapping[str, list[str]]:
    """By size of state: selectors of the tables and runs of other sizes."""
    sizes = [size for size in (*board.suite.state_bytes, None) if any(cell.budget == size for cell in board.cells)]
    return {
        "no fixed size" if size is None else f"{size:,} bytes": [
            *(f"#size-{other or 0}" for other in sizes if other != size),
            f".runs:not(.size-{size or 0})",
        ]
        for size in sizes
    }
