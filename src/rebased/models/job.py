"""A job, which asks for sequences after prompts, and the events that tell what became of it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Literal, NamedTuple

from rebased.data.detokenize import StopStrings
from rebased.models.sampling import Sampling


@dataclass(frozen=True)
class GenerateOptions(Sampling):
    """How tokens are chosen (Sampling), how many sequences are written, and when each of them ends.

    Args:
        temperature, top_k, top_p, min_p, repetition_penalty, seed: see Sampling.
        max_tokens: how many tokens a sequence gets at most. Default 256.
        n: how many sequences are written per prompt. Default 1.
        stop: strings that end a sequence; they need a tokenizer.
        end_of_text: the token that ends a sequence. Default: the tokenizer's, if there is one.
        ignore_end_of_text: whether a sequence goes on after that token. Default False.
    """

    max_tokens: int = 256
    n: int = 1
    stop: tuple[str, ...] = ()
    end_of_text: int | None = None
    ignore_end_of_text: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, what in (("max_tokens", "tokens"), ("n", "sequences per prompt")):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} {value!r} is not a number of {what}; give 1 or more")
        if isinstance(self.stop, str):
            raise ValueError(f"stop {self.stop!r} should be a list of strings; write [{self.stop!r}]")
        object.__setattr__(self, "stop", tuple(self.stop))
        StopStrings(self.stop)  # an error if one is empty


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
    """The result of a step. The first three lists have one entry per sequence that got a token."""

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
