"""Ctrl-C and SIGTERM stop a run between two steps, never within a step."""

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from rebased.train.sinks import Sink


class Stopped(Exception):
    """Raised to leave a run that was asked to stop, after it has been saved."""


class StopRequest:
    """A signal handler that remembers the first signal. The second signal raises KeyboardInterrupt."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self.asked, self._waiting = False, sinks

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    def check(self) -> bool:
        """True if the run should stop here. The first time, `stopping` of each sink is called.

        Sinks are not called from the signal handler itself, because it may interrupt their own output.
        """
        if self.asked:
            sinks, self._waiting = self._waiting, ()
            for sink in sinks:
                sink.stopping()
        return self.asked


@contextmanager
def stop_request(sinks: Sequence[Sink] = ()) -> Iterator[StopRequest]:
    """A StopRequest that handles SIGINT and SIGTERM within the context. Its `check` notifies the sinks."""
    request = StopRequest(sinks)
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        yield request
        return
    former = {number: signal.signal(number, request) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
