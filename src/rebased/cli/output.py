"""--json and --quiet, which every command has: where its result and its messages go."""

import json
import logging
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import Console
from rich.text import Text

from rebased.cli.results import to_json
from rebased.cli.terminal import Terminal
from rebased.files import replacing

OPTIONS = ("--json", "--quiet")
STDOUT = Path("-")
OUT_OPTION = Parameter(name=["--out", "-o"])
"""What a command writes: a folder, or a page. Every command that writes one calls the option so."""


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


class Messages(Output):
    """Where a command writes that another command calls: only messages. The caller has a result of its own."""

    def emit(self, result: Any) -> None:
        """Give nothing."""


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


class _Once(logging.Handler):
    """Collects messages without repetition, in the order of their first appearance."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: dict[str, None] = {}

    def emit(self, record: logging.LogRecord) -> None:
        self.messages[record.getMessage()] = None


@contextmanager
def each_warning_once(console: Console) -> Iterator[None]:
    """Hold back the package's log messages inside the block, and print each distinct one as a note at its end."""
    logger, handler = logging.getLogger("rebased"), _Once()
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate
        for message in handler.messages:
            say(console, f"note: {message}")
