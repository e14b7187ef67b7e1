"""The engine: a loop around the scheduler. Commands come in from other threads; what happened goes out, once per step.

It computes and nothing else: text, JSON and HTTP are the front end's (serve/client.py), in another process.
"""

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch

from rebased.models import Decoder, GenerateOptions, LanguageModel, LMConfig, Sampling
from rebased.models.invariant_decoder import InvariantDecoder
from rebased.models.job import Failed, Job, OfJob, Told
from rebased.models.prefixes import PrefixStates
from rebased.models.prompt_graph import PromptGraphs, reads_in_graphs
from rebased.models.scheduler import Scheduler, Stats

_log = logging.getLogger("rebased")

WARM_UP = (Sampling(temperature=0.0), Sampling(), Sampling(top_p=0.9))  # one per way to choose tokens
WARM_UP_PROMPTS = (2048, 2, 2)  # tokens; the last passes show what a pass takes at least
CAPTURED_AFTER = 5  # steps, at least one of which is a replay
CPU_CHUNK, GPU_CHUNK = 1024, 16_384  # tokens of prompts between two steps; a GPU reads as many as it can at once
LOOK_SECONDS = 0.05  # how often it looks whether the time of a job is over, and tells its counts
TIME_OVER = Failed("timeout", "the request took longer than the server allows")


class Add(NamedTuple):
    """Take a job. It ends with an error at the deadline, as time.monotonic() counts."""

    job: Job
    deadline: float


class Cancel(NamedTuple):
    """End a job, by its key. Nothing of it is told any more."""

    job: int


class Stop(NamedTuple):
    """End a sequence, which is worth `length` tokens."""

    number: int
    length: int


class Close(NamedTuple):
    """End: drop what is under way."""


Command = Add | Cancel | Stop | Close


class Update(NamedTuple):
    """What happened in a step, and counts."""

    told: list[Told]
    broken: str | None  # why the last step failed
    counts: "Counts | None"  # now and then, and when nothing is left to do


class Counts(NamedTuple):
    """Counts since the engine began, and what it keeps."""

    stats: Stats = Stats()
    prefix_bytes: int = 0
    prefix_states: int = 0


class About(NamedTuple):
    """What others must know of an engine."""

    config: LMConfig
    parameters: int
    slots: int
    context: int
    state_bytes: int
    fusion: str
    captures: bool


class Engine:
    """Serves jobs with a model, at most `slots` sequences at a time.

    Args:
        model: in eval mode. Its weights must not change.
        slots: sequences that are decoded at once. Memory for all of them is taken now.
        context: tokens per sequence, prompt included. At most the model's positions.
        prefill_chunk: tokens of prompts that are read between two steps at most. Default: 1,024 on a CPU; on a GPU as
            many as the decoder reads at once (`Decoder.prefill_chunk`, up to 32,768), and at least 16,384.
        cache_bytes: memory for states of prompts that were read before; 0 for none.
        capture: whether steps are replayed as CUDA graphs, on a GPU; a model for which that is impossible goes without.
        batch_invariant: whether an answer has the same bits whatever other requests there are, and whatever is cached.
            Prompts are then read by themselves, in chunks that begin at multiples of 128 tokens.

    `obey(command)` may be called from any thread. `run()` serves until it is told to close, and calls `post` with an
    Update after each step.
    """

    def __init__(
        self,
        model: LanguageModel,
        *,
        slots: int,
        context: int,
        prefill_chunk: int | None = None,
        cache_bytes: int = 0,
        capture: bool = False,
        batch_invariant: bool = False,
    ) -> None:
        self.model = model
        self.post: Callable[[Update], object] = lambda update: None
        self.slots, self.context, self.captures = slots, context, capture
        self.prefixes = PrefixStates(cache_bytes)
        make: Any = InvariantDecoder if batch_invariant else partial(Decoder, narrow=True)
        self.decoder: Decoder | InvariantDecoder = make(model, slots, capacity=context, grows=False)
        if capture:
            self.decoder.capture_steps(required=False)
        on_gpu = model.embedding.weight.device.type == "cuda"
        budget = prefill_chunk or (max(GPU_CHUNK, self.decoder.prefill_chunk) if on_gpu else CPU_CHUNK)
        self.prompt_graphs: PromptGraphs | None = None
        if capture and not batch_invariant and reads_in_graphs(model):
            with suppress(torch.OutOfMemoryError):  # they are then read more slowly
                self.prompt_graphs = PromptGraphs(model, budget)
        self.scheduler = Scheduler(
            self.decoder,
            context=context,
            prefill_budget=budget,
            prefixes=self.prefixes,
            lag=1 if on_gpu else 0,
            gathers=on_gpu,
            prompt_graphs=self.prompt_graphs,
        )
        self.broken: str | None = None
        self._inbox: list[Command] = []
        self._wake = threading.Condition()
        self._jobs: dict[int, Add] = {}  # by key
        self._closed = False
        self._look_at = 0.0  # when it looks next

    def about(self) -> About:
        """Return what others must know of it."""
        model, decoder = self.model, self.decoder
        sizes = (model.num_parameters(), self.slots, self.context, decoder.state_bytes)
        return About(model.config, *sizes, decoder.fusion, self.captures)

    def warm_up(self) -> None:
        """Make a few steps and read prompts before the first request: what is wrong shows now, and kernels compile."""
        for slot, sampling in product((size - 1 for size in reversed(self.decoder.sizes())), WARM_UP):
            self.decoder.put(slot, [0], self.model.init_state(1), sampling)
            for _ in range(min(CAPTURED_AFTER, self.context) if self.captures else 1):
                self.decoder.step()
            self.decoder.free(slot)
        if self.prompt_graphs is not None:
            self.prompt_graphs.warm_up()
        limit, self.prefixes.limit = self.prefixes.limit, 0  # nothing of this is kept
        on_gpu = self.model.embedding.weight.device.type == "cuda"
        for token, length in enumerate(WARM_UP_PROMPTS if on_gpu else WARM_UP_PROMPTS[-1:]):
            prompt = [token % self.model.config.vocab_size] * min(length, self.context)
            self.scheduler.add(Job([prompt], GenerateOptions(max_tokens=1, temperature=0.0)))
            while self.scheduler.busy:
                for told in self.scheduler.step():
                    if isinstance(told, OfJob) and isinstance(told.event, Failed) and told.event.kind != "model":
                        raise ValueError(told.event.message) from told.event.error
        self.prefixes.limit = limit
        vars(self.scheduler.stats).update(vars(Stats()))

    def obey(self, command: Command) -> None:
        """Take a command, which the next turn obeys."""
        with self._wake:
            self._inbox.append(command)
            self._wake.notify()

    def run(self) -> None:
        """Serve until the command Close comes."""
        while not self._closed:
            with self._wake:
                while not self._inbox and not self._jobs:
                    self._wake.wait()
            self.turn()

    def turn(self) -> None:
        """Obey the commands, let the scheduler make a step, and tell what happened."""
        with self._wake:
            commands, self._inbox = self._inbox, []
        for command in commands:
            self._obey(command)
        now, told = time.monotonic(), list[Told]()
        looks = now >= self._look_at
        if looks:
            for key in [key for key, each in self._jobs.items() if now > each.deadline]:
                self.scheduler.cancel(self._jobs.pop(key).job)
                told.append(OfJob(key, TIME_OVER))
        before = self.scheduler.stats.steps
        told += self.scheduler.step()
        if self.scheduler.stats.steps > before:
            self.broken = None
        told = [self._log_failure(each) if isinstance(each, OfJob) else each for each in told]
        for key in [key for key, each in self._jobs.items() if each.job.over]:
            del self._jobs[key]
        counts = None
        if looks or not self._jobs:
            self._look_at = now + LOOK_SECONDS
            counts = Counts(replace(self.scheduler.stats), self.prefixes.bytes, len(self.prefixes))
        self.post(Update(told, self.broken, counts))

    def _obey(self, command: Command) -> None:
        match command:
            case Add(job, _):
                self._jobs[job.key] = command
                self.scheduler.add(job)
            case Cancel(key):
                if key in self._jobs:
                    self.scheduler.cancel(self._jobs.pop(key).job)
            case Stop(number, length):
                self.scheduler.stop(number, length)
            case Close():
                self._closed = True

    def _log_failure(self, told: OfJob) -> OfJob:
        """Log the error of a job; a message of it is enough for others."""
        event = told.event
        if not isinstance(event, Failed) or event.error is None:
            return told
        _log.error("%s", event.message, exc_info=event.error)
        if event.kind == "step":
            self.broken = event.message.removeprefix("the model failed: ")
        return told._replace(event=event._replace(error=None))
