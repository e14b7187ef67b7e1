"""A log that grows slowly, whatever clients do: each line of code may write some messages per minute."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

MESSAGES = 10  # that one line of code writes per PERIOD
PERIOD = 60.0  # seconds


class RateLimit(logging.Filter):
    """Passes MESSAGES messages of a line of code per PERIOD. The first of the next period counts those left out."""

    def __init__(self) -> None:
        super().__init__()
        self._began: dict[tuple[str, int], float] = {}
        self._count: dict[tuple[str, int], int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a message is written."""
        origin, now = (record.pathname, record.lineno), time.monotonic()
        if now - self._began.get(origin, -PERIOD) >= PERIOD:
            left_out = self._count.get(origin, 0) - MESSAGES
            if left_out > 0:
                record.msg = f"{record.msg} ({left_out} like this were left out before)"
            self._began[origin], self._count[origin] = now, 0
        self._count[origin] += 1
        return self._count[origin] <= MESSAGES


@contextmanager
def limited_log(*names: str) -> Iterator[None]:
    """Limit the rate of these logs inside the block."""
    limit = RateLimit()
    for name in names:
        logging.getLogger(name).addFilter(limit)
    try:
        yield
    finally:
        for name in names:
            logging.getLogger(name).removeFilter(limit)
