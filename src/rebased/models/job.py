"""A job, which asks for sequences after prompts, and the events that tell what became of it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Literal, NamedTuple

from rebased.models.options import GenerateOptions

FinishReason = Literal["stop", "length"]
"""Why a sequence ended, in OpenAI's words. "stop": the end-of-text token or a stop string. "length": max_tokens are
made, or the model has no more positions."""


class Scored(NamedTuple):
    """A token with its log-probability under the model, and the most probable tokens in its place."""

    token: int
    logprob: float | None  # None for the first token of a prompt, which nothing precedes
    top: list[tuple[int, float]]  # (token, log-probability), the most probable first


class PromptRead(NamedTuple):
    """A prompt is read."""

    prompt: int  # its number
    cached: int  # tokens that were not read again, because another prompt began with them
    scores: list[Scored]  # one per token, if they were asked for


class Made(NamedTuple):
    """A sequence got tokens, or is over."""

    sequence: int  # its number: those of the first prompt come first
    scored: list[Scored]  # one per token; empty if the sequence gets no token at all (only_read)
    text: str  # the text that became whole with them
    finish_reason: FinishReason | None  # None while the sequence goes on


class Failed(NamedTuple):
    """The job is over without a result."""

    kind: Literal["job", "step", "model", "timeout", "stopped"]  # the last two: whoever runs the scheduler ended it
    message: str
    error: Exception | None = None


Event = PromptRead | Made | Failed


class Began(NamedTuple):
    """A sequence of a job began; from now on it is known by a number of its own."""

    number: int  # among all sequences of a scheduler
    job: int  # its key
    sequence: int  # among those of the job


class NewTokens(NamedTuple):
    """What a step made. The first three lists have one entry per sequence that got a token."""

    numbers: list[int]  # of the sequences
    tokens: list[int]
    logprobs: list[float]
    tops: dict[int, tuple[float, list[tuple[int, float]]]]  # as `Scored` has them, by number, where they were asked for
    ended: dict[int, FinishReason]  # why sequences are over, by number


class OfJob(NamedTuple):
    """Something happened to a whole job."""

    job: int  # its key
    event: PromptRead | Failed


Told = Began | NewTokens | OfJob
"""What a scheduler tells. `Written` (models/written.py) turns it into events with text."""

_keys = count()


@dataclass(eq=False)
class Job:
    """Prompts, as tokens, and what is asked of the sequences after them: options.n per prompt.

    Nothing follows a Failed, nor the finish_reason of its last sequence.
    """

    prompts: list[list[int]]
    options: GenerateOptions = field(default_factory=GenerateOptions)
    top: int | None = None  # how many of the most probable tokens come with each token; None: no log-probabilities
    score_prompts: bool = False  # whether tokens of prompts are scored too
    only_read: bool = False  # whether prompts are read, and scored, and nothing is written after them
    marks: Sequence[Sequence[int]] = ()  # per prompt: numbers of tokens after which a state is worth keeping
    keep_end: bool = False  # whether the state at the end of a sequence is worth keeping: a chat goes on from there
    over: bool = False  # set by the scheduler, as the next one
    left: int = 0  # sequences that are not over
    key: int = field(default_factory=_keys.__next__)  # by which processes know it

    @property
    def count(self) -> int:
        """How many sequences there are."""
        return len(self.prompts) * self.options.n
