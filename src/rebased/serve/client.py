"""The front end's side of an engine: jobs go out, updates come in and become events with text, in the event loop."""

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from rebased.data.tokenizer import Tokenizer
from rebased.models.job import Event, Failed, Job
from rebased.models.written import Written
from rebased.serve.engine import About, Add, Cancel, Close, Counts, Stop, Update
from rebased.serve.process import EngineProcess

_log = logging.getLogger("rebased")

PAUSE_PER_CLIENT = 100e-6  # seconds: twice what it takes to write a chunk to one client
LONGEST_PAUSE = 0.05


Deliver = Callable[[list[Event]], None]


class Full(Exception):
    """Too many choices are waiting."""


class Closed(Exception):
    """The engine takes no requests any more."""


class EngineClient:
    """An engine as the front end sees it.

    Args:
        about: what the engine tells about itself.
        tokenizer: turns tokens into text.
        line: how to reach it: its process.
        max_waiting: sequences beyond the engine's slots at most; `submit` raises Full beyond.

    `start()` begins, `drain()` refuses new jobs and lets the others end, `close()` ends at once. All other methods are
    called in one thread, that of the event loop. Updates that wait together are delivered together: with many clients
    there is a short pause between two deliveries, so that each client gets fewer and longer chunks.
    """

    def __init__(self, about: About, tokenizer: Tokenizer, line: EngineProcess, *, max_waiting: int = 1024) -> None:
        self.about, self.tokenizer, self.max_waiting, self._line = about, tokenizer, max_waiting, line
        self.counts = Counts()
        self.broken: str | None = None  # why the last step failed, or the engine ended
        self.on_lost: Callable[[], None] = lambda: None  # called in the event loop if the engine ends by itself
        self._clients: dict[int, tuple[Job, Deliver]] = {}  # by the keys of jobs that are not over
        self._written = Written(
            tokenizer,
            stop=lambda number, length: line.send(Stop(number, length)),
            cancel=lambda job: line.send(Cancel(job.key)),
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()
        self._updates: list[Update] = []  # that are not delivered yet
        self._not_before = 0.0  # when the next delivery may be
        self.closing = False  # whether new jobs are refused
        self.lost = False  # whether the engine ended by itself

    def start(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Begin. Events are delivered in the event loop."""
        self._loop = loop
        self._line.open(self._arrived, self._engine_lost)

    def submit(self, job: Job, deliver: Deliver, deadline: float = math.inf) -> None:
        """Take a job. Raises Full or Closed; otherwise `deliver(events)` gets everything that happens to it, in order.

        The job ends with an error at the deadline, as time.monotonic() counts.
        """
        if self.closing:
            raise Closed
        if self.running + self.waiting + job.count > self.about.slots + self.max_waiting:
            raise Full
        self._clients[job.key] = (job, deliver)
        self._written.add(job)
        self._line.send(Add(job, deadline))

    def cancel(self, job: Job) -> None:
        """End a job whose client is gone. Nothing of it is delivered any more."""
        if self._clients.pop(job.key, None) is not None:
            self._written.drop(job)
            self._line.send(Cancel(job.key))

    def drain(self) -> None:
        """Refuse new jobs from now on; those that were taken go on. Safe in a signal handler."""
        self.closing = True

    def close(self) -> None:
        """End: refuse new jobs, drop those under way, and wait for the engine."""
        self.closing = True
        self._line.send(Close())
        self._line.close()
        self._end_all("the server was stopped")

    @property
    def alive(self) -> bool:
        """Whether the engine runs."""
        return self._line.alive

    @property
    def waiting(self) -> int:
        """How many sequences have not begun."""
        return self._written.waiting

    @property
    def running(self) -> int:
        """How many sequences are being decoded."""
        return self._written.running

    def _arrived(self, update: Update) -> None:
        """Note an update, in the thread that it comes from, and see that it is delivered."""
        with self._lock:
            self._updates.append(update)
            is_first = len(self._updates) == 1
        if is_first:
            self._in_loop(self._deliver_in_time)

    def _in_loop(self, function: Callable[[], None]) -> None:
        """Call a function in the event loop, whichever thread this is."""
        assert self._loop is not None
        with suppress(RuntimeError):  # the loop is closed: nobody is left to hear it
            self._loop.call_soon_threadsafe(function)

    def _deliver_in_time(self) -> None:
        pause = self._not_before - time.monotonic()
        if pause > 0 and self._loop is not None:
            self._loop.call_later(pause, self._deliver)
        else:
            self._deliver()

    def _deliver(self) -> None:
        """Deliver the updates that are there, one call per job."""
        with self._lock:
            updates, self._updates = self._updates, []
        if not updates:
            return
        self.broken = updates[-1].broken
        self.counts = next((each.counts for each in reversed(updates) if each.counts is not None), self.counts)
        by_job: dict[int, list[Event]] = {}
        for told_of, event in self._written.take([each for update in updates for each in update.told]):
            by_job.setdefault(told_of.key, []).append(event)
        for key, events in by_job.items():
            job, deliver = self._clients[key]
            if job not in self._written:
                del self._clients[key]
            try:
                deliver(events)
            except Exception as error:  # of this client; the others get their events
                _log.exception("events of a request could not be taken")
                self.cancel(job)
                with suppress(Exception):
                    deliver([Failed("job", f"the answer could not be taken: {type(error).__name__}")])
        self._not_before = time.monotonic() + min(LONGEST_PAUSE, PAUSE_PER_CLIENT * len(by_job))

    def _engine_lost(self, reason: str) -> None:
        """Tell all clients that the engine has ended by itself, from whichever thread notices."""

        def tell() -> None:
            self.closing = self.lost = True
            self.broken = reason
            _log.error("%s", reason)
            self._deliver()
            self._end_all(reason)
            self.on_lost()

        self._in_loop(tell)

    def _end_all(self, reason: str) -> None:
        clients, self._clients = list(self._clients.values()), {}
        for job, deliver in clients:
            self._written.drop(job)
            deliver([Failed("stopped", reason)])
