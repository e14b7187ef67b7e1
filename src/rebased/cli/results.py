"""What commands that measure share: progress over named steps, and a JSON file that replaces none."""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from rebased.files import replacing


class Step(Protocol):
    """Begin a bar; what comes back is called with how much is done."""

    def __call__(self, name: str, total: int) -> Callable[[int], None]: ...


@contextmanager
def steps(console: Console) -> Iterator[Step]:
    """Bars, one below the other, that vanish in the end. In a log there are none."""
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )

    def step(name: str, total: int) -> Callable[[int], None]:
        task = progress.add_task(name, total=total)
        return lambda done: progress.update(task, completed=done)

    with progress:
        yield step


def check_new(path: Path | None) -> None:
    """Before an hour of measuring, not after."""
    if path is None:
        return
    if path.exists():
        raise ValueError(f"{path} is there already; choose another file, or remove it")
    if not path.parent.is_dir():
        raise ValueError(f"there is no folder {path.parent}; make it first")


def write_json(path: Path, content: dict[str, Any]) -> None:
    with replacing(path) as file:
        file.write(json.dumps(_finite(content), indent=1, allow_nan=False).encode() + b"\n")


def _finite(value: Any) -> Any:
    """JSON has no nan and no infinity: null says that there is no such number."""
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
