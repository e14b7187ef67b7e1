"""The engine: a thread around the scheduler. Requests come in as jobs from other threads; events go out."""

import logging
import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from rebased.data.tokenizer import Tokenizer
from rebased.models import Decoder, LanguageModel, Sampling
from rebased.models.invariant_decoder import InvariantDecoder
from rebased.models.job import Event, Failed, Job
from rebased.models.prefixes import PrefixStates
from rebased.models.scheduler import Scheduler, Stats

_log = logging.getLogger("rebased")

WARM_UP = (Sampling(temperature=0.0), Sampling(), Sampling(top_p=0.9))  # one per way to choose tokens
CAPTURED_AFTER = 5  # steps, at least one of which is a replay
IDLE_SECONDS = 1.0  # how often it looks whether it is closed, while nothing else happens


class Full(Exception):
    """Too many choices are waiting."""


class Closed(Exception):
    """The engine takes no requests any more."""


class _Client(NamedTuple):
    """Who asked for a job."""

    deliver: Callable[[list[Event]], None]
    deadline: float  # as time.monotonic() counts


class Engine:
    """Serves jobs with a model, at most `slots` sequences at a time.

    Args:
        model: in eval mode. Its weights must not change.
        tokenizer: turns tokens into text.
        slots: sequences that are decoded at once. Memory for all of them is taken now.
        context: tokens per sequence, prompt included. At most the model's positions.
        max_waiting: sequences that wait for a slot at most; `submit` raises Full beyond.
        prefill_chunk: tokens of prompts that are read between two steps at most.
        cache_bytes: memory for states of prompts that were read before; 0 for none.
        capture: whether steps are replayed as CUDA graphs, on a GPU; a model for which that is impossible goes without.
        batch_invariant: whether an answer has the same bits whatever other requests there are, and whatever is cached.
            Prompts are then read by themselves, in chunks that begin at multiples of 128 tokens.
        post: calls a function. Events are delivered by it, all those of a step in one call. An event loop gives its
            call_soon_threadsafe; by default the engine's thread delivers itself.

    `start()` begins, `drain()` refuses new jobs and lets the others end, `close()` ends at once.
    """

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Tokenizer,
        *,
        slots: int,
        context: int,
        max_waiting: int = 1024,
        prefill_chunk: int = 1024,
        cache_bytes: int = 0,
        capture: bool = False,
        batch_invariant: bool = False,
        post: Callable[[Callable[[], None]], object] = lambda call: call(),
    ) -> None:
        self.model, self.tokenizer, self.post = model, tokenizer, post
        self.slots, self.context, self.max_waiting, self.captures = slots, context, max_waiting, capture
        self.prefixes = PrefixStates(cache_bytes)
        make = InvariantDecoder if batch_invariant else Decoder
        self.decoder = make(model, slots, capacity=context, grows=False)
        if capture:
            self.decoder.capture_steps(required=False)
        self.scheduler = Scheduler(
            self.decoder, tokenizer, context=context, prefill_budget=prefill_chunk, prefixes=self.prefixes
        )
        self.broken: str | None = None  # why the last step failed
        self._lock = threading.Condition()
        self._clients: dict[Job, _Client] = {}  # of jobs that are not over
        self._new: list[Job] = []  # for the scheduler
        self._cancelled: list[Job] = []
        self._closing, self._closed = False, False
        self._thread = threading.Thread(target=self._run, name="rebased-engine", daemon=True)

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def warm_up(self) -> None:
        """Make a few steps before the first request: what is wrong shows now, and kernels are compiled."""
        for sampling in WARM_UP:
            self.decoder.put(0, [0], self.model.init_state(1), sampling)
            for _ in range(min(CAPTURED_AFTER, self.context) if self.captures else 1):
                self.decoder.step()
            self.decoder.free(0)

    def submit(self, job: Job, deliver: Callable[[list[Event]], None], deadline: float = math.inf) -> None:
        """Take a job. Raises Full or Closed; otherwise `deliver(events)` gets everything that happens to it, in order.

        The job ends with an error at the deadline, as time.monotonic() counts.
        """
        with self._lock:
            if self._closing or self._closed:
                raise Closed
            if self.waiting + job.count > self.max_waiting:
                raise Full
            self._clients[job] = _Client(deliver, deadline)
            self._new.append(job)
            self._lock.notify()

    def cancel(self, job: Job) -> None:
        """End a job whose client is gone. Nothing of it is delivered any more."""
        with self._lock:
            if self._clients.pop(job, None) is not None:
                self._cancelled.append(job)
                self._lock.notify()

    def drain(self) -> None:
        """Refuse new jobs from now on; those that were taken go on. Safe in a signal handler."""
        self._closing = True

    def close(self, timeout: float = 10.0) -> None:
        """End: refuse new jobs, drop those under way, and wait for the thread."""
        self._closing = self._closed = True
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            with self._lock:
                self._lock.notify()
            self._thread.join(timeout)

    @property
    def closing(self) -> bool:
        """Whether new jobs are refused."""
        return self._closing

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def busy(self) -> bool:
        """Whether jobs are under way or wait, or are to be dropped."""
        return bool(self._clients or self._cancelled)

    @property
    def waiting(self) -> int:
        """How many sequences have no slot yet."""
        return sum(job.count for job in self._new) + self.scheduler.waiting

    @property
    def running(self) -> int:
        """How many sequences are being decoded."""
        return self.scheduler.running

    @property
    def stats(self) -> Stats:
        """Counts since the engine began."""
        return self.scheduler.stats

    def turn(self) -> None:
        """Let the scheduler make a step, and deliver what happened.

        The engine's thread calls it all the time. Without `start`, whoever owns the engine can call it instead.
        """
        events = self._pass_on()
        before = self.stats.steps
        events += self.scheduler.step()
        if self.stats.steps > before:
            self.broken = None
        for _, event in events:
            if isinstance(event, Failed) and event.error is not None:
                _log.error("%s", event.message, exc_info=event.error)
                if event.kind == "step":
                    self.broken = event.message.removeprefix("the model failed: ")
        self._hand_out(events)

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                self.turn()
        finally:  # if the thread fails, too: nobody waits for it
            self._closing = self._closed = True
            with self._lock:
                left = list(self._clients)
            for job in left:
                self.scheduler.cancel(job)
            self.stats.failures += len(left)
            self._hand_out([(job, Failed("stopped", "the server was stopped")) for job in left])

    def _wait_for_work(self) -> bool:
        """Wait until there is something to do. Returns False at the end."""
        with self._lock:
            while not self._closed and not self.busy:
                self._lock.wait(IDLE_SECONDS)
            return not self._closed

    def _pass_on(self) -> list[tuple[Job, Event]]:
        """Pass new and cancelled jobs on to the scheduler, and end those whose time is over."""
        with self._lock:
            for job in self._new:
                self.scheduler.add(job)
            now = time.monotonic()
            expired = [job for job, client in self._clients.items() if now > client.deadline]
            for job in [*self._cancelled, *expired]:
                self.scheduler.cancel(job)
            self._new, self._cancelled = [], []
        return [(job, Failed("timeout", "the request took longer than the server allows")) for job in expired]

    def _hand_out(self, events: list[tuple[Job, Event]]) -> None:
        """Deliver what happened, one call per job, and forget the jobs that are over."""
        by_job: dict[Job, list[Event]] = {}
        for job, event in events:
            by_job.setdefault(job, []).append(event)
        with self._lock:
            calls = [(job, self._clients[job].deliver, some) for job, some in by_job.items() if job in self._clients]
            for job in by_job:
                if job.over:
                    self._clients.pop(job, None)

        def deliver() -> None:
            for job, call, some in calls:
                try:
                    call(some)
                except Exception as error:  # of this client; the others get their events
                    _log.exception("events of a request could not be taken")
                    self.cancel(job)
                    with suppress(Exception):
                        call([Failed("job", f"the answer could not be taken: {type(error).__name__}", error)])

        try:
            if calls:
                self.post(deliver)
        except Exception:  # the event loop is closed: nobody is left to hear it
            _log.exception("events could not be delivered")
