"""The scheduler: prompts are read, sequences take slots of a decoder, get tokens and end (continuous batching).

It knows tokens, and neither text nor threads nor time limits nor HTTP. `generate` and `stream` run one job with it
(models/generation.py), the server many (serve/engine.py). What it holds per slot is in arrays, so that the host's work
per step hardly grows with the number of sequences.
"""

import heapq
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

import numpy as np

from rebased.models.decoder import Decoder
from rebased.models.invariant_decoder import InvariantDecoder
from rebased.models.job import Began, Failed, FinishReason, Job, NewTokens, OfJob, PromptRead, Told
from rebased.models.network import LMState
from rebased.models.prefixes import PrefixStates
from rebased.models.prompt_graph import PromptGraphs
from rebased.models.prompt_reader import PromptReader, Reading, begin_alike, score_rows
from rebased.models.step_graph import Fetch
from rebased.models.written import short_error

Tops = dict[int, tuple[float, list[tuple[int, float]]]]

UNREAD = "the prompt could not be read"
PATIENCE = 3.0  # prompts that gather wait at most so many times as long as the shortest pass over prompts took


@dataclass
class Stats:
    """Counts since the scheduler began."""

    prompt_tokens: int = 0  # of prompts, cached ones included
    cached_tokens: int = 0
    made_tokens: int = 0
    steps: int = 0
    failures: int = 0  # jobs that ended with an error
    step_seconds: float = 0.0
    prefill_seconds: float = 0.0


@dataclass(eq=False)
class _Sequence:
    """A sequence that has begun."""

    job: Job
    sequence: int  # among the sequences of the job
    number: int  # among all
    slot: int | None  # None once its last step is launched
    tokens: list[int] = field(default_factory=list)  # only where its state is kept at the end
    end_state: LMState | None = None  # after all tokens but the last

    @property
    def prompt(self) -> list[int]:
        return self.job.prompts[self.sequence // self.job.options.n]


class _Launched(NamedTuple):
    """A step that the device computes, or has computed. Arrays have one entry per sequence in it."""

    fetch: Fetch
    slots: np.ndarray
    numbers: np.ndarray  # of the sequences
    lengths: np.ndarray  # tokens before this one
    ends: np.ndarray  # the end-of-text tokens; -1: none
    is_last: np.ndarray  # whether a sequence gets no token after this one
    tops: Tops  # by the numbers of sequences
    follows: float | None  # when the pass over prompts began that came just before it


class Scheduler:
    """Runs jobs with a decoder, at most as many sequences at a time as it has slots.

    Args:
        decoder: a Decoder; or an InvariantDecoder, with which a sequence has the same bits whatever else there is.
        context: tokens per sequence, prompt included. Default: the model's positions, or no limit.
        prefill_budget: tokens of prompts that are read between two steps at most, so that sequences in slots go on
            meanwhile. Default: all free slots are filled before a step.
        prefixes: keeps states of prompts that were read before. Default: none are kept.
        lag: steps that are launched before the tokens of a step are looked at. With 1 a GPU never waits for the host; a
            sequence that ends at an end-of-text token is then found a step late, and that step's token left out.
            Default 0.
        gathers: whether prompts wait for others, so that one pass reads several: on a GPU a pass takes some time,
            however few tokens it has. They wait longer the more sequences decode meanwhile. Default False.
        prompt_graphs: reads prompts as CUDA graphs. Default: they are read as the model is written.

    `add`, `cancel` and `stop` are called between steps; `step()` returns what happened.
    """

    def __init__(
        self,
        decoder: Decoder | InvariantDecoder,
        *,
        context: int | None = None,
        prefill_budget: int | None = None,
        prefixes: PrefixStates | None = None,
        lag: int = 0,
        gathers: bool = False,
        prompt_graphs: PromptGraphs | None = None,
    ) -> None:
        self.decoder, self.prefill_budget, self.lag, self.gathers = decoder, prefill_budget, lag, gathers
        self.context = context or decoder.model.config.length_limit or math.inf
        self.batch_invariant = isinstance(decoder, InvariantDecoder)
        self.prefixes = PrefixStates(0) if prefixes is None else prefixes
        self.stats = Stats()
        self._reader = PromptReader(decoder.model, self.prefixes, self.batch_invariant, prompt_graphs)
        self._waiting: deque[tuple[Job, int]] = deque()  # prompts by their numbers
        self._reading: list[Reading] = []  # prompts that are read together, in the order in which they came
        self._ready: deque[tuple[Reading, int]] = deque()  # sequences whose prompts are read, without slots
        self._free = list(range(decoder.slots))  # a heap: the lowest slot is taken first
        self._running: dict[int, _Sequence] = {}  # by slot
        self._open: dict[int, _Sequence] = {}  # by number: those in slots, and those whose last step is launched
        self._keeping: set[int] = set()  # numbers of those whose states are kept at the end
        self._launched: deque[_Launched] = deque()
        self._numbers = count()
        self._number = np.zeros(decoder.slots, dtype=np.int64)  # of the sequence in each slot
        self._length = np.zeros(decoder.slots, dtype=np.int64)  # tokens that it has, those of launched steps included
        self._limit = np.zeros(decoder.slots, dtype=np.int64)  # tokens that it may have
        self._end_token = np.zeros(decoder.slots, dtype=np.int64)  # -1: it does not end at a token
        self._told: list[Told] = []
        self._left = 0  # sequences of all jobs that are not over
        self._has_ended = False  # whether a job ended before its sequences did: they are to be dropped
        self._pass_began: float | None = None  # of a pass over prompts, until the first step after it is over
        self._pass_ended = 0.0
        self._shortest_pass: float | None = None  # seconds: about what a pass takes whatever it reads

    @property
    def waiting(self) -> int:
        """How many sequences have no slot yet."""
        return max(0, self._left - len(self._open))

    @property
    def busy(self) -> bool:
        """Whether a sequence is not over."""
        return self._left > 0

    def add(self, job: Job) -> None:
        """Take a job."""
        job.left = job.count
        self._left += job.left
        self._waiting.extend((job, number) for number in range(len(job.prompts)))

    def cancel(self, job: Job) -> None:
        """End a job. Nothing of it is told any more."""
        if not job.over:
            self._end(job)
            self._drop_ended()

    def stop(self, number: int, length: int) -> None:
        """End a sequence, which is worth `length` tokens. Nothing of it is told any more."""
        if (sequence := self._open.get(number)) is not None and not sequence.job.over:
            self._close(sequence, useful=len(sequence.prompt) + length)

    def step(self, on_prefill: Callable[[int, int], None] = lambda done, total: None) -> list[Told]:
        """Read some of the prompts, then make the next token of every sequence in a slot. Returns what happened.

        A job that fails is told so (Failed); the others go on. `on_prefill(done, total)` is called after each pass over
        prompts, with numbers of their tokens.
        """
        try:
            if self._may_read():
                self._read_prompts(on_prefill)
            if self._has_ended:  # a sequence that could not begin is in no slot of the decoder
                self._drop_ended()
            if self._running:
                self._launch()
            while self._launched and (len(self._launched) > self.lag or not self._running):
                self._collect(self._launched.popleft())
        except Exception as error:  # whatever a model or a device does
            self._fail_all(error)
        if self._has_ended:
            self._drop_ended()
        told, self._told = self._told, []
        return told

    def _launch(self) -> None:
        """Begin a step. Sequences that get their last token in it leave their slots: the next ones come after it."""
        started = time.perf_counter()
        made = self.decoder.step()
        slots = np.fromiter(self._running, dtype=np.int64, count=len(self._running))
        lengths = self._length[slots]
        is_last = lengths + 1 >= self._limit[slots]
        numbers, ends = self._number[slots], self._end_token[slots]
        follows, self._pass_began = self._pass_began, None
        self._launched.append(_Launched(Fetch(made), slots, numbers, lengths, ends, is_last, self._tops(), follows))
        self._length[slots] += 1
        for slot in slots[is_last].tolist():
            sequence = self._running[slot]
            if sequence.number in self._keeping:
                sequence.end_state = self.decoder.get(slot)
            self._leave_slot(sequence)
        self.stats.steps += 1
        self.stats.step_seconds += time.perf_counter() - started

    def _collect(self, step: _Launched) -> None:
        """Look at the tokens of a step, and end sequences where that is due."""
        started = time.perf_counter()
        tokens, logprobs = step.fetch.wait()
        now = time.perf_counter()
        self.stats.step_seconds += now - started
        if step.follows is not None:  # the device is through with the pass before it
            self._pass_ended, took = now, now - step.follows
            self._shortest_pass = took if self._shortest_pass is None else min(self._shortest_pass, took)
        tokens, logprobs = tokens[step.slots], logprobs[step.slots]
        for row in (~np.isfinite(logprobs)).nonzero()[0]:
            if (sequence := self._open.get(int(step.numbers[row]))) is not None:
                length = len(sequence.prompt) + step.lengths[row]
                message = f"the model's logits are not finite after {length} tokens: it has diverged in training, or "
                message += "its precision is too low"
                self._fail(sequence.job, Failed("model", message, ValueError(message)))
        if self._has_ended:
            self._drop_ended()
        numbers, is_last, is_end = step.numbers.tolist(), step.is_last, tokens == step.ends
        kept = [row for row, number in enumerate(numbers) if number in self._open]  # others ended meanwhile
        if len(kept) < len(numbers):
            numbers, is_last, is_end = [numbers[row] for row in kept], is_last[kept], is_end[kept]
            tokens, logprobs = tokens[kept], logprobs[kept]
        ended: dict[int, FinishReason] = {numbers[row]: "length" for row in is_last.nonzero()[0]}
        ended |= {numbers[row]: "stop" for row in is_end.nonzero()[0]}
        tops = {number: step.tops[number] for number in numbers if number in step.tops} if step.tops else {}
        made = NewTokens(numbers, tokens.tolist(), logprobs.tolist(), tops, ended)
        self._told.append(made)
        self.stats.made_tokens += len(numbers)
        if self._keeping:
            for number, token in zip(made.numbers, made.tokens, strict=True):
                if number in self._keeping:
                    self._open[number].tokens.append(token)
        for number, reason in ended.items():
            sequence = self._open[number]
            useful = len(sequence.prompt) + len(sequence.tokens) - (reason == "stop")  # nothing follows an end of text
            self._close(sequence, useful)

    def _may_read(self) -> bool:
        """Whether prompts are read before the next step, or gather."""
        if not self.gathers or not self._running or self._ready:
            return True
        if any(step.follows is not None for step in self._launched):  # how long a pass took is not known yet
            return False
        if self._shortest_pass is None:
            return True
        waits = min(self.waiting, len(self._free))
        if not waits:
            return False
        due = min(len(self._running) / waits, PATIENCE) * self._shortest_pass
        return time.perf_counter() - self._pass_ended >= due

    def _read_prompts(self, on_prefill: Callable[[int, int], None]) -> None:
        """Read prompts as long as slots are free and the budget lasts, and let their sequences take the slots."""
        started, self._pass_began = time.perf_counter(), None
        budget = math.inf if self.prefill_budget is None else self.prefill_budget
        while budget > 0 and self._free:
            if self._ready:
                self._take_slot(*self._ready.popleft())
                continue
            if self.prefill_budget is None:
                self._begin_together()
            else:
                self._begin_some(budget)
            if not self._reading:
                break
            budget -= self._read(budget, on_prefill)
        self.stats.prefill_seconds += time.perf_counter() - started

    def _begin_some(self, budget: float) -> None:
        """Begin with prompts that wait, as long as there are tokens to read for the budget, and slots to go on in.

        A prompt that begins like one that is being read waits: it then goes on from that one's state.
        """
        left = sum(reading.left for reading in self._reading)
        slots = sum(reading.job.options.n for reading in self._reading)
        while self._waiting and left < budget and slots < len(self._free):
            job, number = self._waiting[0]
            prompt = job.prompts[number]
            if self.prefixes.limit and any(begin_alike(prompt, reading.prompt) for reading in self._reading):
                return
            begun = self._begin(*self._waiting.popleft())
            if begun is not None:
                left, slots = left + begun.left, slots + job.options.n

    def _begin_together(self) -> None:
        """Begin with the next prompts that can be read whole in one pass. Equal ones of a job are read once.

        At most as many different ones as there are slots, of `prefill_chunk` tokens together; a longer one alone.
        """
        if self._reading:
            return
        chunk = 0 if self.batch_invariant else self.decoder.prefill_chunk
        tokens, first = 0, dict[tuple[int, ...], Reading | None]()
        while self._waiting:
            job, number = self._waiting[0]
            prompt = tuple(job.prompts[number])
            if prompt not in first:
                if first and (len(first) == self.decoder.slots or tokens + len(prompt) > chunk):
                    return
                tokens += len(prompt)
            self._waiting.popleft()
            same = first.get(prompt)
            if same is not None and same.job is job and not job.score_prompts:
                same.numbers.append(number)
            else:
                first[prompt] = self._begin(job, number)

    def _begin(self, job: Job, number: int) -> Reading | None:
        if not job.over:
            with self._failing_alone(job, UNREAD):
                reading = self._reader.begin(job, number)
                self._reading.append(reading)
                self.stats.prompt_tokens += len(reading.prompt)
                self.stats.cached_tokens += reading.cached
                return reading
        return None

    def _read(self, budget: float, on_prefill: Callable[[int, int], None]) -> int:
        """Read up to `budget` tokens of the prompts that are begun. Returns how many, and at least 1."""
        started = time.perf_counter()
        if not self.batch_invariant:
            budget = min(budget, self.decoder.prefill_chunk)
        try:
            count = self._reader.read(self._reading, budget)
        except Exception:  # which of them it was shows when each is read by itself
            count = 0
            for reading in self._reading:
                if not reading.job.over:
                    with self._failing_alone(reading.job, UNREAD):
                        count += self._reader.read([reading], max(1, budget - count))
        if count and self._pass_began is None:  # not where all was known before
            self._pass_began = started
        on_prefill(sum(each.state.position for each in self._reading), sum(len(each.prompt) for each in self._reading))
        read = [(each, number) for each in self._reading if not each.left for number in each.numbers]
        for reading, number in sorted(read, key=lambda each: (each[0].job.key, each[1])):  # as they came
            if not reading.job.over:
                self._end_reading(reading, number)
        self._reading = [reading for reading in self._reading if reading.left and not reading.job.over]
        return max(1, count)

    def _end_reading(self, reading: Reading, prompt: int) -> None:
        """Let the sequences of a prompt that is read wait for slots."""
        job, n = reading.job, reading.job.options.n
        self._told.append(OfJob(job.key, PromptRead(prompt, reading.cached, reading.scores)))
        for number in range(prompt * n, (prompt + 1) * n):
            if job.only_read:
                sequence = self._begin_sequence(job, number, None)
                self._told.append(NewTokens([], [], [], {}, {sequence.number: "length"}))
                self._close(sequence, 0)
            else:
                self._ready.append((reading, number))

    def _begin_sequence(self, job: Job, number: int, slot: int | None) -> _Sequence:
        sequence = _Sequence(job, number, next(self._numbers), slot)
        self._open[sequence.number] = sequence
        self._told.append(Began(sequence.number, job.key, number))
        if job.keep_end and self.prefixes.limit and not self.batch_invariant:  # a prompt that is read has other bits
            self._keeping.add(sequence.number)
        return sequence

    def _take_slot(self, reading: Reading, number: int) -> None:
        job, options = reading.job, reading.job.options
        if not job.over:
            with self._failing_alone(job, "the sequence could not begin"):
                slot = heapq.heappop(self._free)
                # first: a sequence that fails leaves its slot as all others do
                sequence = self._running[slot] = self._begin_sequence(job, number, slot)
                room = self.context + 1 - len(reading.prompt)  # the last token needs no place
                self._number[slot], self._length[slot] = sequence.number, 0
                self._limit[slot] = max(1, min(options.max_tokens, room))
                end = -1 if options.end_of_text is None or options.ignore_end_of_text else options.end_of_text
                self._end_token[slot] = end
                self.decoder.put(slot, reading.prompt, reading.state, options, sequence=number, later=True)

    def _leave_slot(self, sequence: _Sequence) -> None:
        assert sequence.slot is not None
        slot, sequence.slot = sequence.slot, None
        del self._running[slot]
        heapq.heappush(self._free, slot)
        self.decoder.free(slot)

    def _close(self, sequence: _Sequence, useful: int) -> None:
        """End a sequence. Its state is kept if it has read no more than the first `useful` tokens, prompt included."""
        if sequence.number in self._keeping:
            self._keeping.remove(sequence.number)
            state = sequence.end_state
            if state is None and sequence.slot is not None and self.decoder.length(sequence.slot) <= useful:
                state = self.decoder.get(sequence.slot)
            tokens = [*sequence.prompt, *sequence.tokens]
            if state is not None and state.position <= min(useful, len(tokens)):
                self.prefixes.keep([(tokens[: state.position], state)])
        if sequence.slot is not None:
            self._leave_slot(sequence)
        del self._open[sequence.number]
        job = sequence.job
        job.left -= 1
        self._left -= 1
        job.over = job.left == 0

    def _tops(self) -> Tops:
        """Return the log-probability and the most probable tokens of the sequences that asked for them, by number."""
        slots = [slot for slot, each in self._running.items() if each.job.top]
        if slots and not self.batch_invariant:
            with suppress(Exception):  # which of them it was shows when each is scored by itself
                return self._score(slots)
        found: Tops = {}
        for slot in slots:
            with self._failing_alone(self._running[slot].job, "the next token could not be scored"):
                found |= self._score([slot])
        return found

    def _score(self, slots: list[int]) -> Tops:
        sequences = [self._running[slot] for slot in slots]
        logits, tokens = self.decoder.logits[slots], self.decoder.tokens[slots].tolist()
        rows = score_rows(logits, tokens, max(each.job.top or 0 for each in sequences))
        return {
            each.number: (row.logprob or 0.0, row.top[: each.job.top])
            for each, row in zip(sequences, rows, strict=True)
        }

    @contextmanager
    def _failing_alone(self, job: Job, what: str) -> Iterator[None]:
        """Let what goes wrong inside the block, such as too little memory for a prompt, end this job and no other."""
        try:
            yield
        except Exception as error:
            self._fail(job, Failed("job", f"{what}: {short_error(error)}", error))

    def _fail_all(self, error: Exception) -> None:
        """End all jobs that are being read or decoded; those that wait stay, if there are others."""
        self._launched.clear()
        jobs = {each.job for each in self._open.values()} | {each.job for each in self._reading}
        jobs |= {each.job for each, _ in self._ready}
        for job in jobs or {job for job, _ in self._waiting}:
            self._fail(job, Failed("step", f"the model failed: {short_error(error)}", error))

    def _fail(self, job: Job, why: Failed) -> None:
        if not job.over:
            self.stats.failures += 1
            self._told.append(OfJob(job.key, why))
            self._end(job)

    def _end(self, job: Job) -> None:
        """End a job whose sequences are not over."""
        self._left -= job.left
        job.over, job.left, self._has_ended = True, 0, True

    def _drop_ended(self) -> None:
        """Forget the sequences of jobs that ended."""
        self._has_ended = False
        for sequence in [each for each in self._open.values() if each.job.over]:
            del self._open[sequence.number]
            self._keeping.discard(sequence.number)
            if sequence.slot is not None:
                self._leave_slot(sequence)
        self._ready = deque(each for each in self._ready if not each[0].job.over)
        self._reading = [reading for reading in self._reading if not reading.job.over]
        self._waiting = deque(each for each in self._waiting if not each[0].over)
