"""Ctrl-C and SIGTERM end a run between two steps, not within one."""

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Protocol


class Stopped(Exception):
    """Raised where a run can be left because it was asked to end: what it had to save is saved."""


class Listener(Protocol):
    """A sink, of whichever kind of run."""

    def stopping(self) -> None: ...


class StopRequest:
    """Whether somebody has asked the run to end. The second time of asking it ends at once."""

    def __init__(self, listeners: Sequence[Listener]) -> None:
        self.asked, self._untold = False, listeners

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    def check(self) -> bool:
        """Whether to stop here; before that is done, which can take a while, listeners hear of it. Not from within the
        signal's handler: what they write may just be under way."""
        if self.asked:
            untold, self._untold = self._untold, ()
            for listener in untold:
                listener.stopping()
        return self.asked


@contextmanager
def stop_request(listeners: Sequence[Listener] = ()) -> Iterator[StopRequest]:
    """Listeners hear of it when the run checks it."""
    request = StopRequest(listeners)
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        yield request
        return
    former = {number: signal.signal(number, request) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
