"""The scheduler: prompts are read, sequences take slots of a decoder, get tokens and end (continuous batching).

It knows neither threads nor time limits nor HTTP. `generate` and `stream` run one job with it (models/generation.py),
the server many (serve/engine.py).
"""

import heapq
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace

import torch

from rebased.data.detokenize import TextStream
from rebased.data.tokenizer import Tokenizer
from rebased.models.decoder import Decoder
from rebased.models.invariant_decoder import InvariantDecoder
from rebased.models.job import Event, Failed, Job, Made, PromptRead, Scored
from rebased.models.prefixes import PrefixStates
from rebased.models.prompt_reader import PromptReader, Reading, begin_alike, score_rows

UNREAD = "the prompt could not be read"


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
    """A sequence in a slot."""

    job: Job
    number: int  # among the sequences of the job
    text: TextStream
    tokens: list[int] = field(default_factory=list)

    @property
    def prompt(self) -> list[int]:
        return self.job.prompts[self.number // self.job.options.n]


class Scheduler:
    """Runs jobs with a decoder, at most as many sequences at a time as it has slots.

    Args:
        decoder: a Decoder; or an InvariantDecoder, with which a sequence has the same bits whatever else there is.
        tokenizer: turns tokens into text. Without one, texts are empty.
        context: tokens per sequence, prompt included. Default: the model's positions, or no limit.
        prefill_budget: tokens of prompts that are read between two steps at most, so that sequences in slots go on
            meanwhile. Default: all free slots are filled before a step.
        prefixes: keeps states of prompts that were read before. Default: none are kept.

    `add(job)` and `cancel(job)` are called between steps; `step()` returns what happened.
    """

    def __init__(
        self,
        decoder: Decoder | InvariantDecoder,
        tokenizer: Tokenizer | None = None,
        *,
        context: int | None = None,
        prefill_budget: int | None = None,
        prefixes: PrefixStates | None = None,
    ) -> None:
        self.decoder, self.tokenizer, self.prefill_budget = decoder, tokenizer, prefill_budget
        self.context = context or decoder.model.config.length_limit or math.inf
        self.batch_invariant = isinstance(decoder, InvariantDecoder)
        self.prefixes = PrefixStates(0) if prefixes is None else prefixes
        self.stats = Stats()
        self._reader = PromptReader(decoder.model, self.prefixes, batch_invariant=self.batch_invariant)
        self._waiting: deque[tuple[Job, int]] = deque()  # prompts by their numbers
        self._reading: list[Reading] = []  # prompts that are read together, in the order in which they came
        self._ready: deque[tuple[Reading, int]] = deque()  # sequences whose prompts are read, without slots
        self._free = list(range(decoder.slots))  # a heap: the lowest slot is taken first
        self._running: dict[int, _Sequence] = {}  # by slot
        self._events: list[tuple[Job, Event]] = []
        self._left = 0  # sequences of all jobs that are not over
        self._has_ended = False  # whether a job ended before its sequences did: they are to be dropped

    @property
    def running(self) -> int:
        """How many sequences are in slots."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """How many sequences have no slot yet."""
        return max(0, self._left - len(self._running))

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

    def step(self, on_prefill: Callable[[int, int], None] = lambda done, total: None) -> list[tuple[Job, Event]]:
        """Read some of the prompts, then make the next token of every sequence in a slot. Returns what happened.

        A job that fails is told so (Failed); the others go on. `on_prefill(done, total)` is called after each pass over
        prompts, with numbers of their tokens.
        """
        try:
            self._read_prompts(on_prefill)
            if self._running:
                self._make_tokens()
        except Exception as error:  # whatever a model or a device does
            self._fail_all(error)
        if self._has_ended:
            self._drop_ended()
        events, self._events = self._events, []
        return events

    def _make_tokens(self) -> None:
        started = time.perf_counter()
        made = self.decoder.step()
        tokens, logprobs, failed = made.tokens.tolist(), made.logprobs.tolist(), self.decoder.failed
        tops = self._tops()
        self.stats.steps += 1
        self.stats.step_seconds += time.perf_counter() - started
        for slot, sequence in list(self._running.items()):
            if not sequence.job.over:
                logprob, top = tops.get(slot, (logprobs[slot], []))
                with self._failing_alone(sequence.job, "the next token could not be taken"):
                    if slot in failed:
                        raise failed[slot]
                    self._take(slot, sequence, Scored(tokens[slot], logprob, top))

    def _read_prompts(self, on_prefill: Callable[[int, int], None]) -> None:
        """Read prompts as long as slots are free and the budget lasts, and let their sequences take the slots."""
        started = time.perf_counter()
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
        while self._waiting and sum(reading.left for reading in self._reading) < budget:
            if sum(reading.job.options.n for reading in self._reading) >= len(self._free):
                return
            job, number = self._waiting[0]
            prompt = job.prompts[number]
            if self.prefixes.limit and any(begin_alike(prompt, reading.prompt) for reading in self._reading):
                return
            self._begin(*self._waiting.popleft())

    def _begin_together(self) -> None:
        """Begin with the next prompts that can be read whole in one pass. Equal ones of a job are read once."""
        if self._reading:
            return
        chunk = 0 if self.batch_invariant else self.decoder.prefill_chunk
        count = count_together((job.prompts[number] for job, number in self._waiting), self.decoder.slots, chunk)
        first: dict[tuple[int, ...], Reading] = {}
        for _ in range(count):
            job, number = self._waiting.popleft()
            prompt = tuple(job.prompts[number])
            same = first.get(prompt)
            if same is not None and same.job is job and not job.score_prompts:
                self._reading.append(replace(same, number=number, same=same))
            elif (reading := self._begin(job, number)) is not None:
                first[prompt] = reading

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
        on_prefill(sum(each.state.position for each in self._reading), sum(len(each.prompt) for each in self._reading))
        unread = []
        for reading in self._reading:
            if reading.left:
                unread.append(reading)
            elif not reading.job.over:
                self._end_reading(reading)
        self._reading = [reading for reading in unread if not reading.job.over]
        return max(1, count)

    def _end_reading(self, reading: Reading) -> None:
        """Let the sequences of a prompt that is read wait for slots."""
        job, n = reading.job, reading.job.options.n
        self._tell(job, PromptRead(reading.number, reading.cached, reading.scores))
        for number in range(reading.number * n, (reading.number + 1) * n):
            if job.only_read:
                self._finish(job, Made(number, None, "", "length"))
            else:
                self._ready.append((reading, number))

    def _take_slot(self, reading: Reading, number: int) -> None:
        job = reading.job
        if not job.over:
            with self._failing_alone(job, "the sequence could not begin"):
                sequence = _Sequence(job, number, TextStream(self.tokenizer, job.options.stop))
                slot = heapq.heappop(self._free)
                self._running[slot] = sequence  # first: a sequence that fails leaves its slot as all others do
                self.decoder.put(slot, reading.prompt, reading.state, job.options, sequence=number)

    def _leave_slot(self, slot: int) -> None:
        del self._running[slot]
        heapq.heappush(self._free, slot)
        self.decoder.free(slot)

    def _tops(self) -> dict[int, tuple[float, list[tuple[int, float]]]]:
        """Return the log-probability and the most probable tokens of the sequences that asked for them, by slot."""
        wanted = {slot: each.job.top for slot, each in self._running.items() if each.job.top}
        if not wanted:
            return {}
        found: dict[int, tuple[float, list[tuple[int, float]]]] = {}
        logits, tokens = self.decoder.logits, self.decoder.tokens

        def score(slots: list[int]) -> None:
            index = torch.tensor(slots, device=logits.device)
            rows = score_rows(logits[index], tokens[index].tolist(), max(wanted[slot] for slot in slots))
            for slot, row in zip(slots, rows, strict=True):
                found[slot] = (row.logprob or 0.0, row.top[: wanted[slot]])

        if not self.batch_invariant:
            with suppress(Exception):  # which of them it was shows when each is scored by itself
                score(list(wanted))
        for slot in [slot for slot in wanted if slot not in found]:
            with self._failing_alone(self._running[slot].job, "the next token could not be scored"):
                score([slot])
        return found

    def _take(self, slot: int, sequence: _Sequence, scored: Scored) -> None:
        """Give a sequence its next token, and end it where that is due."""
        job, options, length = sequence.job, sequence.job.options, len(sequence.prompt) + len(sequence.tokens)
        if scored.logprob is None or not math.isfinite(scored.logprob):
            message = f"the model's logits are not finite after {length} tokens: it has diverged in training, or its "
            message += "precision is too low"
            return self._fail(job, Failed("model", message, ValueError(message)))
        sequence.tokens.append(scored.token)
        self.stats.made_tokens += 1
        is_end = scored.token == options.end_of_text
        made = Made(sequence.number, scored, "" if is_end else sequence.text.push(scored.token), None)
        if (is_end and not options.ignore_end_of_text) or sequence.text.stopped:
            made = made._replace(finish_reason="stop")
        elif len(sequence.tokens) >= options.max_tokens or length >= self.context:
            made = made._replace(finish_reason="length")
        if made.finish_reason is None:
            return self._tell(job, made)
        if job.keep_end and self.prefixes.limit and not self.batch_invariant:  # a prompt that is read has other bits
            self.prefixes.keep([*sequence.prompt, *sequence.tokens[:-1]], self.decoder.get(slot))
        self._leave_slot(slot)
        self._finish(job, made._replace(text=made.text + sequence.text.finish()))

    def _finish(self, job: Job, made: Made) -> None:
        self._tell(job, made)
        job.left -= 1
        self._left -= 1
        job.over = job.left == 0

    @contextmanager
    def _failing_alone(self, job: Job, what: str) -> Iterator[None]:
        """Let what goes wrong inside the block, such as too little memory for a prompt, end this job and no other."""
        try:
            yield
        except Exception as error:
            self._fail(job, Failed("job", f"{what}: {_short(error)}", error))

    def _fail_all(self, error: Exception) -> None:
        """End all jobs that are being read or decoded; those that wait stay, if there are others."""
        jobs = {each.job for each in self._running.values()} | {each.job for each in self._reading}
        jobs |= {each.job for each, _ in self._ready}
        for job in jobs or {job for job, _ in self._waiting}:
            self._fail(job, Failed("step", f"the model failed: {_short(error)}", error))

    def _fail(self, job: Job, why: Failed) -> None:
        if not job.over:
            self.stats.failures += 1
            self._tell(job, why)
            self._end(job)

    def _end(self, job: Job) -> None:
        """End a job whose sequences are not over."""
        self._left -= job.left
        job.over, job.left, self._has_ended = True, 0, True

    def _drop_ended(self) -> None:
        """Forget the sequences of jobs that ended."""
        self._has_ended = False
        for slot, sequence in list(self._running.items()):
            if sequence.job.over:
                with suppress(Exception):  # of a device that is gone; the next step will tell
                    self._leave_slot(slot)
        self._ready = deque(each for each in self._ready if not each[0].job.over)
        self._reading = [reading for reading in self._reading if not reading.job.over]
        self._waiting = deque(each for each in self._waiting if not each[0].over)

    def _tell(self, job: Job, event: Event) -> None:
        if not job.over:
            self._events.append((job, event))


def count_together(prompts: Iterable[list[int]], slots: int, chunk: int) -> int:
    """Return how many of the first prompts are read in one pass.

    They have at most `slots` different prompts of `chunk` tokens together; a longer prompt is read alone.
    """
    different, tokens, count = set[tuple[int, ...]](), 0, 0
    for each in prompts:
        prompt = tuple(each)
        if prompt not in different:
            if different and (len(different) == slots or tokens + len(prompt) > chunk):
                break
            different.add(prompt)
            tokens += len(prompt)
        count += 1
    return count


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0][:300]
