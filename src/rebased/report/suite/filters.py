"""Filters of a suite's page, by task, mixer and size of state: CSS alone, so they work without a script.

A chosen radio button hides what belongs to other choices. Without :has() in a browser the page shows everything.
"""

from collections.abc import Iterable, Mapping, Sequence
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
    tasks, rules = list(board.suite.tasks), []
    columns = f":nth-child(n+{BEFORE + 1}):nth-child(-n+{BEFORE + len(tasks)})"
    for t, _ in enumerate(tasks):
        hidden = [
            f'[data-name="recall-by-bytes"] .panel:not(:nth-child({t + 1}))',
            f".by-task :is(th, td){columns}:not(:nth-child({BEFORE + 1 + t}))",
            f".runs:not(.task-{t})",
        ]
        rules.append(rule(f"task-{t}", hidden))
    families = {f"with {factor}": having(board, factor) for factor in board.factors}
    families |= {"others": [name for name in board.mixers if name not in compared(board)]} if families else {}
    for f, shown in enumerate(families.values()):
        others = [m for m, name in enumerate(board.mixers) if name not in (*shown, *board.own)]
        rules.append(rule(f"family-{f}", (hidden for m in others for hidden in parts_of(m))))
    sizes = [size for size in (*board.suite.state_bytes, None) if any(cell.budget == size for cell in board.cells)]
    for s, size in enumerate(sizes):
        others = [f"#state-{other or 0}" for other in sizes if other != size]
        rules.append(rule(f"size-{s}", [*others, f".runs:not(.size-{size or 0})"]))
    groups = {
        "task": tasks,
        "family": list(families),
        "size": ["no set size" if size is None else f"{size:,} bytes" for size in sizes],
    }
    fields = "".join(fieldset(name, options) for name, options in groups.items() if len(options) > 1)
    return f'<style>{STYLE}{"".join(rules)}</style><form class="filters">{fields}</form>'


def compared(board: Board) -> list[str]:
    """The mixers of the suite that are compared by factors."""
    return [name for name, mixer in board.suite.mixers.items() if mixer.factors]


def having(board: Board, factor: str) -> list[str]:
    """The mixers of the suite that have a factor."""
    return [name for name, mixer in board.suite.mixers.items() if mixer.factors.get(factor)]


def parts_of(mixer: int) -> Sequence[str]:
    """Selectors of what the page shows of a mixer: its lines and dots, its rows and its runs."""
    return f".of-{mixer}", f'tr:has(a[href^="#runs-{mixer}-"])'


def rule(chosen: str, hidden: Iterable[str]) -> str:
    """A rule of CSS: these parts are hidden if this button is chosen."""
    return f"body:has(#{chosen}:checked) :is({', '.join(hidden)}) {{ display: none; }}\n"


def fieldset(name: str, options: Sequence[str]) -> str:
    """Radio buttons, of which "all" is chosen first."""
    buttons = {f"{name}-all": "all"} | {f"{name}-{i}": option for i, option in enumerate(options)}
    button = f'<label><input type="radio" name="{name}" id="{{}}"{{}}> {{}}</label> '
    labels = "".join(
        button.format(each, " checked" * each.endswith("-all"), escape(option)) for each, option in buttons.items()
    )
    return f"<fieldset><legend>{LEGENDS[name]}</legend>{labels}</fieldset>"


LEGENDS: Mapping[str, str] = {"task": "task", "family": "mixers", "size": "state"}
