"""The engine: one thread that reads prompts and decodes the choices of all requests together (continuous batching)."""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch

from rebased.data.detokenize import TextStream
from rebased.data.tokenizer import Tokenizer
from rebased.models import Decoder, LanguageModel, Sampling
from rebased.models.invariant_decoder import InvariantDecoder
from rebased.serve.job import Choice, Event, Failed, Job, Made, PromptRead, Scored
from rebased.serve.prefixes import PrefixStates
from rebased.serve.prompt_reader import PromptReader, Reading, begin_alike, score_rows

_log = logging.getLogger("rebased")

WARM_UP = (Sampling(temperature=0.0), Sampling(), Sampling(top_p=0.9))  # one per way to choose tokens
CAPTURED_AFTER = 5  # steps, at least one of which is a replay
IDLE_SECONDS = 1.0  # how often deadlines are looked at while nothing else happens


class Full(Exception):
    """Too many choices are waiting."""


class Closed(Exception):
    """The engine takes no requests any more."""


@dataclass
class Stats:
    """Counts since the engine began."""

    prompt_tokens: int = 0  # of prompts, cached ones included
    cached_tokens: int = 0
    made_tokens: int = 0
    steps: int = 0
    failures: int = 0  # requests that ended with an error of the model or of the engine
    step_seconds: float = 0.0
    prefill_seconds: float = 0.0


class Engine:
    """Serves jobs with a model, at most `slots` choices at a time.

    Args:
        model: in eval mode. Its weights must not change.
        tokenizer: turns tokens into text.
        slots: choices that are decoded at once. Memory for all of them is taken now.
        context: tokens per sequence, prompt included. At most the model's positions.
        max_waiting: choices that wait for a slot at most; `submit` raises Full beyond.
        prefill_chunk: tokens of prompts that are read between two steps at most.
        cache_bytes: memory for states of prompts that were read before; 0 for none.
        capture: whether steps are replayed as CUDA graphs, on a GPU.
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
        self.slots, self.context, self.max_waiting, self.prefill_chunk = slots, context, max_waiting, prefill_chunk
        self.batch_invariant = batch_invariant
        self._capture = capture
        self.decoder = self._make_decoder()
        self.prefixes = PrefixStates(cache_bytes)
        self._reader = PromptReader(model, self.prefixes, batch_invariant=batch_invariant)
        self.stats = Stats()
        self.broken: str | None = None  # why the last step failed
        self._lock = threading.Condition()
        self._waiting: deque[deque[Choice]] = deque()  # the n choices of a prompt stand together
        self._reading: list[Reading] = []  # prompts that are read together, in the order in which they came
        self._ready: deque[tuple[Choice, Reading]] = deque()  # prompts that are read, choices without slots
        self._free = list(range(slots))
        self._running: dict[int, Choice] = {}  # by slot
        self._events: list[tuple[Job, Event]] = []
        self._jobs: set[Job] = set()
        self._waiting_choices = 0
        self._closing, self._closed, self._look = False, False, False
        self._thread = threading.Thread(target=self._run, name="rebased-engine", daemon=True)

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def warm_up(self) -> None:
        """Make a few steps before the first request: what is wrong shows now, and kernels are compiled.

        A model whose step cannot be captured as a CUDA graph is decoded without.
        """
        try:
            self._warm_up()
        except ValueError as error:
            if not self._capture:
                raise
            _log.warning("%s", error)
            self._capture = False
            self.decoder = self._make_decoder()
            self._warm_up()

    def _make_decoder(self) -> Decoder | InvariantDecoder:
        make = InvariantDecoder if self.batch_invariant else Decoder
        return make(self.model, self.slots, capacity=self.context, grows=False, capture=self._capture)

    def _warm_up(self) -> None:
        for sampling in WARM_UP:
            self.decoder.put(0, [0], self.model.init_state(1), sampling)
            for _ in range(min(CAPTURED_AFTER, self.context) if self._capture else 1):
                self.decoder.step()
            self.decoder.free(0)

    def submit(self, job: Job) -> None:
        """Take a job. Raises Full or Closed; otherwise everything about it goes to job.deliver."""
        with self._lock:
            if self._closing or self._closed:
                raise Closed
            count = len(job.prompts) * job.n
            if self._waiting_choices + count > self.max_waiting:
                raise Full
            number = 0
            for prompt in range(len(job.prompts)):
                group: deque[Choice] = deque()
                for _ in range(job.n):
                    group.append(Choice(job, number, prompt, TextStream(self.tokenizer, job.stop)))
                    number += 1
                self._waiting.append(group)
            job.left = count
            self._waiting_choices += count
            self._jobs.add(job)
            self._lock.notify()

    def cancel(self, job: Job) -> None:
        """End a job whose client is gone. Nothing of it is delivered any more."""
        with self._lock:
            if not job.over:
                job.cancelled = self._look = True
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
        """Whether jobs are under way or wait, or have left something behind that is to be dropped."""
        return bool(self._jobs) or self._look

    @property
    def waiting(self) -> int:
        """How many choices have no slot yet."""
        return self._waiting_choices

    @property
    def running(self) -> int:
        """How many choices are being decoded."""
        return len(self._running)

    def _run(self) -> None:
        while self._wait_for_work():
            self.turn()
        for job in list(self._jobs):
            self._fail(job, Failed("engine", "the server was stopped"))
        self._hand_out()

    def _wait_for_work(self) -> bool:
        """Wait until there is something to do. Returns False at the end."""
        with self._lock:
            while not self._closed and not self.busy:
                self._lock.wait(IDLE_SECONDS)
            return not self._closed

    def turn(self) -> None:
        """Read some of the prompts, then make the next token of every choice that is in a slot, and deliver it.

        The engine's thread calls it all the time. Without `start`, whoever owns the engine can call it instead.
        """
        try:
            self._turn()
        except Exception as error:  # whatever a model or a device does: the requests fail, the server goes on
            self._fail_all(error)
        self._hand_out()

    def _turn(self) -> None:
        self._drop_jobs()
        self._read_prompts()
        if not self._running:
            return
        started = time.perf_counter()
        made = self.decoder.step()
        tokens, logprobs = made.tokens.tolist(), made.logprobs.tolist()
        tops = self._tops()
        self.stats.steps += 1
        self.stats.step_seconds += time.perf_counter() - started
        self.broken = None
        for slot, choice in list(self._running.items()):
            logprob, top = tops.get(slot, (logprobs[slot], []))
            self._take(choice, Scored(tokens[slot], logprob, top))

    def _drop_jobs(self) -> None:
        """Forget the jobs that were cancelled, and end those whose time is over."""
        with self._lock:
            jobs, look, self._look = list(self._jobs), self._look, False
        expired = [job for job in jobs if job.expired]
        for job in expired:
            self._fail(job, Failed("timeout", "the request took longer than the server allows"))
        if not expired and not look:
            return
        for job in jobs:
            if job.cancelled:
                self._end(job)
        for slot, choice in list(self._running.items()):
            if choice.job.over:
                self._leave_slot(slot)
        self._ready = deque(each for each in self._ready if not each[0].job.over)
        self._reading = [reading for reading in self._reading if not reading.job.over]
        with self._lock:
            self._waiting = deque(group for group in self._waiting if not group[0].job.over)
            self._count_waiting()

    def _read_prompts(self) -> None:
        """Read at most `prefill_chunk` tokens of prompts, as long as slots are free."""
        budget, started = self.prefill_chunk, time.perf_counter()
        while budget > 0:
            if self._ready and self._free:
                self._take_slot(*self._ready.popleft())
            elif self._ready or not self._free:
                break
            else:
                while self._has_room(budget) and self._begin_reading():
                    pass
                if not self._reading:
                    break
                budget -= self._read(budget)
        self.stats.prefill_seconds += time.perf_counter() - started
        with self._lock:
            self._count_waiting()

    def _has_room(self, budget: int) -> bool:
        """Whether another prompt can be read in the same pass: there are tokens to read, and slots to go on in."""
        choices = sum(len(reading.choices) for reading in self._reading)
        return choices < len(self._free) and sum(reading.left for reading in self._reading) < budget

    def _begin_reading(self) -> bool:
        """Begin with the next prompt that waits. Returns False if there is none, or if it is to wait for another.

        A prompt that begins like one that is being read waits: it then goes on from that one's state.
        """
        with self._lock:
            if not self._waiting:
                return False
            first = self._waiting[0][0]
            prompt = first.job.prompts[first.prompt]
            if self.prefixes.limit and any(begin_alike(prompt, reading.prompt) for reading in self._reading):
                return False
            choices = self._waiting.popleft()
        if not choices[0].job.over:
            with self._failing_alone(choices[0].job):
                reading = self._reader.begin(choices)
                self._reading.append(reading)
                self.stats.prompt_tokens += len(reading.prompt)
                self.stats.cached_tokens += reading.cached
        return True

    @contextmanager
    def _failing_alone(self, job: Job) -> Iterator[None]:
        """What goes wrong inside the block, such as too little memory for its prompt, ends this job and no other."""
        try:
            yield
        except Exception as error:
            _log.exception("a prompt could not be read")
            self._fail(job, Failed("engine", f"the prompt could not be read: {_short(error)}"))

    def _read(self, budget: int) -> int:
        """Read up to `budget` tokens of the prompts that are begun. Returns how many, and at least 1."""
        try:
            count = self._reader.read(self._reading, budget)
        except Exception:  # which of them it was shows when each is read by itself
            count = 0
            for reading in self._reading:
                with self._failing_alone(reading.job):
                    count += self._reader.read([reading], max(1, budget - count))
        for reading in self._reading:
            if not reading.left and not reading.job.over:
                self._end_reading(reading)
        self._reading = [reading for reading in self._reading if reading.left and not reading.job.over]
        return max(1, count)

    def _end_reading(self, reading: Reading) -> None:
        """Let the choices of a prompt that is read wait for slots."""
        self._tell(reading.job, PromptRead(reading.choices[0].prompt, reading.cached, reading.scores))
        for choice in reading.choices:
            if reading.job.max_tokens:
                self._ready.append((choice, reading))
            else:
                self._finish(choice, Made(choice.number, None, "", "length"))

    def _tops(self) -> dict[int, tuple[float, list[tuple[int, float]]]]:
        """Return the log-probability and the most probable tokens of the choices that asked for them, by slot."""
        wanted = {slot: choice.job.top for slot, choice in self._running.items() if choice.job.top}
        if not wanted:
            return {}
        found: dict[int, tuple[float, list[tuple[int, float]]]] = {}
        logits, tokens = self.decoder.logits, self.decoder.tokens
        for slots in [[slot] for slot in wanted] if self.batch_invariant else [list(wanted)]:
            index = torch.tensor(slots, device=logits.device)
            rows = score_rows(logits[index], tokens[index].tolist(), max(wanted[slot] or 0 for slot in slots))
            found |= {
                slot: (row.logprob or 0.0, row.top[: wanted[slot]]) for slot, row in zip(slots, rows, strict=True)
            }
        return found

    def _take_slot(self, choice: Choice, read: Reading) -> None:
        if choice.job.over:
            return
        with self._failing_alone(choice.job):
            slot = self._free[-1]
            self.decoder.put(slot, read.prompt, read.state, choice.job.sampling, sequence=choice.number)
            choice.slot = self._free.pop()
            self._running[slot] = choice

    def _leave_slot(self, slot: int) -> None:
        self.decoder.free(slot)
        del self._running[slot]
        self._free.append(slot)

    def _take(self, choice: Choice, scored: Scored) -> None:
        """Give a choice its next token, and end it where that is due."""
        job, slot = choice.job, choice.slot
        assert slot is not None
        if job.over:
            return self._leave_slot(slot)
        if scored.logprob is None or not math.isfinite(scored.logprob):
            self._leave_slot(slot)
            return self._fail(job, Failed("model", "the model's logits are not finite: it has diverged in training"))
        choice.tokens.append(scored.token)
        self.stats.made_tokens += 1
        is_end = scored.token == self.tokenizer.end_of_text
        text = "" if is_end else choice.text.push(scored.token)
        length = len(job.prompts[choice.prompt]) + len(choice.tokens)
        made = Made(choice.number, scored, text, None)
        if (is_end and not job.ignore_end_of_text) or choice.text.stopped:
            made = made._replace(finish_reason="stop", text=text + choice.text.finish())
        elif len(choice.tokens) >= job.max_tokens or length > self.context:
            made = made._replace(finish_reason="length", text=text + choice.text.finish())
        if made.finish_reason is None:
            return self._tell(job, made)
        if job.keep_end and self.prefixes.limit and not self.batch_invariant:  # a prompt that is read has other bits
            self.prefixes.keep([*job.prompts[choice.prompt], *choice.tokens[:-1]], self.decoder.get(slot))
        self._leave_slot(slot)
        self._finish(choice, made)

    def _finish(self, choice: Choice, made: Made) -> None:
        self._tell(choice.job, made)
        choice.job.left -= 1
        if choice.job.left == 0:
            self._end(choice.job)

    def _fail(self, job: Job, why: Failed) -> None:
        """End a job with an error. What it has in slots and queues is dropped in the next turn."""
        if not job.over:
            self.stats.failures += why.kind != "timeout"
            self._tell(job, why)
            self._end(job)
            self._look = True

    def _fail_all(self, error: Exception) -> None:
        """End all jobs that are being read or decoded; those that wait stay."""
        _log.exception("a step failed")
        self.broken = _short(error)
        jobs = {choice.job for choice in self._running.values()} | {each[0].job for each in self._ready}
        jobs |= {reading.job for reading in self._reading}
        for job in jobs or list(self._jobs):
            self._fail(job, Failed("engine", f"the model failed: {self.broken}"))
        self._running.clear()
        self._ready.clear()
        self._reading, self._free, self._look = [], list(range(self.slots)), True
        with suppress(Exception):  # a device that is gone stays so; the next step will tell
            for slot in self._free:
                self.decoder.free(slot)

    def _end(self, job: Job) -> None:
        job.over = True
        with self._lock:
            self._jobs.discard(job)

    def _tell(self, job: Job, event: Event) -> None:
        if not job.over and not job.cancelled:
            self._events.append((job, event))

    def _hand_out(self) -> None:
        """Deliver what happened in this turn, one call per job."""
        events, self._events = self._events, []
        if not events:
            return
        by_job: dict[Job, list[Event]] = {}
        for job, event in events:
            by_job.setdefault(job, []).append(event)

        def deliver() -> None:
            for job, some in by_job.items():
                job.deliver(some)

        try:
            self.post(deliver)
        except Exception:  # the event loop is closed: nobody is left to hear it
            _log.exception("events could not be delivered")

    def _count_waiting(self) -> None:
        reading = sum(len(each.choices) for each in self._reading)
        self._waiting_choices = sum(map(len, self._waiting)) + reading + len(self._ready)


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0][:300]
