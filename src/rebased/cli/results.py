"""Shared by commands that measure: progress bars, readable numbers, and JSON."""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from rebased.files import without_nan

OnProgress = Callable[[int, int], None]
"""Called as on_progress(done, total)."""

LARGE = 1e6  # numbers from here on are printed with an exponent


@contextmanager
def progress_bars(console: Console) -> Iterator[Callable[[str], OnProgress]]:
    """A function that begins a progress bar with a name and returns its `on_progress`.

    The bars disappear when the block ends. Outside a terminal nothing is shown.
    """
    progress = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )

    def begin_bar(name: str) -> OnProgress:
        task = progress.add_task(name, total=None)
        return lambda done, total: progress.update(task, completed=done, total=total)

    with progress:
        yield begin_bar


def digits(number: float, decimals: int | None = None) -> str:
    """A number with five significant digits, or with `decimals`; from a million on as 5.5822e+10; "-" for nan."""
    if not math.isfinite(number):
        return "-" if math.isnan(number) else "inf"
    if abs(number) >= LARGE:
        return f"{number:.4e}"
    return f"{number:,.{max(0, 5 - len(str(abs(int(number))))) if decimals is None else decimals}f}"


def to_json(content: Any) -> str:
    """`content` as JSON text. Numbers that are nan or infinite become null; paths become text."""
    return json.dumps(without_nan(content), indent=1, allow_nan=False, default=str) + "\n"
