"""A log that grows slowly, whatever clients do: each line of code may write some messages per minute."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

MESSAGES = 10  # that one line of code writes per period


class RateLimit(logging.Filter):
    """Passes MESSAGES messages of a line of code per `period` seconds. The first of the next period counts those left
    out."""

    def __init__(self, period: float) -> None:
        super().__init__()
        self._period = period
        self._seen: dict[tuple[str, int], tuple[float, int]] = {}  # when a period began, and how many came in it

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a message is written."""
        origin, now = (record.pathname, record.lineno), time.monotonic()
        began, count = self._seen.get(origin, (-self._period, 0))
        if now - began >= self._period:
            if count > MESSAGES:
                record.msg = f"{record.msg} ({count - MESSAGES} like this were left out before)"
            began, count = now, 0
        self._seen[origin] = began, count + 1
        return count < MESSAGES


@contextmanager
def limited_log(*names: str, period: float = 60.0) -> Iterator[None]:
    """Limit the rate of these logs inside the block."""
    limit = RateLimit(period)
    for name in names:
        logging.getLogger(name).addFilter(limit)
    try:
        yield
    finally:
        for name in names:
            logging.getLogger(name).removeFilter(limit)
