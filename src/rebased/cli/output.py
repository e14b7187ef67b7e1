"""What every command prints with: --json and --quiet, consoles, progress bars, numbers and notes."""

import json
import logging
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import IO, Annotated, Any

from cyclopts import Parameter
from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.text import Text

from rebased.config import plain
from rebased.files import replacing, without_nan

OPTIONS = ("--json", "--quiet")
STDOUT = Path("-")
OUT_OPTION = Parameter(name=["--out", "-o"])
"""What a command writes: a folder, or a page. Every command that writes one calls the option so."""
OnProgress = Callable[[int, int], None]
"""Called as on_progress(done, total)."""
LARGE = 1e6  # numbers from here on are printed with an exponent


class Terminal(Console):
    """A rich console for texts that others wrote: names, paths, messages and numbers of files.

    Square brackets are square brackets, :words: are not emoji, and control characters are written out. Styles are given
    as styles (`Text`, `style=`), never as markup. A progress column takes `markup=False`.
    """

    def __init__(self, *, stderr: bool = False, quiet: bool = False, file: IO[str] | None = None) -> None:
        super().__init__(stderr=stderr, quiet=quiet, file=file, markup=False, emoji=False)

    def render_str(self, text: str, **options: Any) -> Text:
        """The text as rich shows it, for a cell or a title. Rich alone would drop some control characters."""
        return super().render_str(plain(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The segments of a renderable. Those that move the cursor are rich's own; all others are cleaned."""
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield Segment(plain(segment.text), segment.style)


@Parameter(name="*")
@dataclass(frozen=True)
class Output:
    """Where a command writes.

    Parameters
    ----------
    json
        Give the result as JSON: to stdout, where nothing else is then printed, or to a new FILE.json.
    quiet
        Print nothing but errors, and JSON where it is asked for.
    """

    json: Annotated[Path | None, Parameter(name="--json", negative="", show_default=False)] = None
    quiet: Annotated[bool, Parameter(name="--quiet", negative="", show_default=False)] = False

    def console(self) -> Console:
        """The console for messages and progress: stdout, or stderr where stdout is for JSON."""
        return Terminal(stderr=self.json == STDOUT, quiet=self.quiet)

    def result_console(self) -> Console:
        """The console for what JSON says too. It prints nothing where JSON goes to stdout."""
        return Terminal(quiet=self.quiet or self.json == STDOUT)

    def warn(self, warnings: Iterable[str]) -> None:
        """Print warnings on stderr, one per line."""
        for warning in warnings:
            line = Text.assemble(("warning:", "yellow"), " ", warning)  # not markup: it may hold brackets
            Terminal(stderr=True, quiet=self.quiet).print(line, soft_wrap=True, highlight=False)

    def check(self, *, resumes: bool = False) -> None:
        """Raise ValueError if --json cannot write its file. Called before work that takes time. A command that resumes
        its work replaces the result of the last time."""
        if self.json is None or self.json == STDOUT:
            return
        if self.json.exists() and not (resumes and _is_a_result(self.json)):
            raise ValueError(f"{self.json} is there already; choose another file, or remove it")
        if not self.json.parent.is_dir():
            raise ValueError(f"there is no folder {self.json.parent}; make it first")

    def emit(self, result: Any) -> None:
        """Give the result as JSON if it is asked for."""
        if self.json == STDOUT:
            sys.stdout.write(to_json(result))
        elif self.json is not None:
            with replacing(self.json) as file:
                file.write(to_json(result).encode())
            say(self.console(), f"wrote {self.json}")


def _is_a_result(path: Path) -> bool:
    """True if a command that can be resumed has written the file."""
    try:
        return "complete" in json.loads(path.read_bytes())
    except (OSError, ValueError, TypeError):
        return False


TO_TERMINAL = Output()
"""Without --json and --quiet: the default of every command."""


def say(console: Console, text: str) -> None:
    """Print a line as it is, without markup, wrapping or colours."""
    console.print(text, soft_wrap=True, highlight=False, markup=False)


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


@contextmanager
def each_warning_once(console: Console) -> Iterator[None]:
    """Hold back the package's log messages inside the block, and print each distinct one as a note at its end."""
    logger, handler = logging.getLogger("rebased"), BufferingHandler(capacity=sys.maxsize)
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate
        for message in dict.fromkeys(record.getMessage() for record in handler.buffer):
            say(console, f"note: {message}")
