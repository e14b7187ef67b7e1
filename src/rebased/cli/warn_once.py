"""Warnings of many configs at once: each text is printed once, not once per config."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console


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
            console.print(f"note: {message}", soft_wrap=True, highlight=False, markup=False)
