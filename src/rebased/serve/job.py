"""What a request asks of the engine, and what the engine answers piece by piece."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from rebased.data.detokenize import TextStream
from rebased.models import FinishReason, Sampling


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
    """A choice got a token, or is over."""

    choice: int  # those of the first prompt come first
    scored: Scored | None  # None if the choice gets no token at all (max_tokens 0)
    text: str  # the text that became whole with it
    finish_reason: FinishReason | None  # None while the choice goes on


class Failed(NamedTuple):
    """The request is over without a result."""

    kind: Literal["timeout", "model", "engine"]
    message: str


Event = PromptRead | Made | Failed


@dataclass(eq=False)
class Job:
    """A request: prompts, n choices for each of them, and how tokens are chosen.

    `deliver(events)` gets everything that happens to it, in order. Nothing comes after a Failed, nor after all choices
    have a finish_reason.
    """

    prompts: list[list[int]]
    deliver: Callable[[list[Event]], None]
    n: int = 1
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int = 16
    stop: tuple[str, ...] = ()
    ignore_end_of_text: bool = False
    top: int | None = None  # how many of the most probable tokens come with each token; None: no log-probabilities
    score_prompts: bool = False  # whether tokens of prompts are scored too
    marks: Sequence[Sequence[int]] = ()  # per prompt: numbers of tokens after which a state is worth keeping
    keep_end: bool = False  # whether the state at the end of a choice is worth keeping: a chat goes on from there
    deadline: float = math.inf  # as time.monotonic() counts
    cancelled: bool = False
    over: bool = False  # nothing is delivered any more
    left: int = 0  # choices that are not over

    @property
    def expired(self) -> bool:
        """Whether the deadline has passed."""
        return time.monotonic() > self.deadline


@dataclass(eq=False)
class Choice:
    """One sequence of a job."""

    job: Job
    number: int  # among the choices of the job
    prompt: int  # number of its prompt
    text: TextStream
    tokens: list[int] = field(default_factory=list)
    slot: int | None = None
