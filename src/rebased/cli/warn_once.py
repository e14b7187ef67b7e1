"""Warnings of many configs at once: each is said once, not once a config."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console


class _Once(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: dict[str, None] = {}

    def emit(self, record: logging.LogRecord) -> None:
        self.messages[record.getMessage()] = None


@contextmanager
def each_warning_once(console: Console) -> Iterator[None]:
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
