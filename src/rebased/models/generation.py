"""A generation under way: an iterator over the tokens that one job gets from a scheduler of its own."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from rebased.data.tokenizer import Tokenizer
from rebased.models.config import LMConfig
from rebased.models.decoder import FIRST_CAPACITY, Decoder
from rebased.models.invariant_decoder import InvariantDecoder
from rebased.models.job import Failed, FinishReason, GenerateOptions, Job, Made
from rebased.models.network import Network
from rebased.models.scheduler import Scheduler
from rebased.models.written import Written

Prompts = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]] | Tensor


class TooLong(ValueError):
    """A prompt has more tokens than the model has positions."""


def read_prompts(
    prompts: Prompts, tokenizer: Tokenizer | None, config: LMConfig, end_of_text: int | None
) -> list[list[int]]:
    """Return the tokens of each prompt, checked against a model's config.

    `prompts` is a text, tokens, or a sequence of either; or a tensor [T] or [B,T]. A prompt without tokens becomes the
    end-of-text token alone.
    """
    given: Any = prompts.tolist() if isinstance(prompts, Tensor) else prompts
    if isinstance(given, str) or _are_whole(given):
        given = [given]
    if len(given) == 0:
        raise ValueError("there are no prompts; give a list of at least one, such as ['']")
    vocab_size, limit = config.vocab_size, config.length_limit
    read = []
    for number, prompt in enumerate(given, 1):
        this = f"prompt {number} of {len(given)}" if len(given) > 1 else "the prompt"
        if not isinstance(prompt, str):
            tokens = prompt.tolist() if isinstance(prompt, Tensor) else list(prompt)
        elif tokenizer is None:
            raise ValueError("a prompt of text needs a tokenizer; give tokenizer=..., or a list of token ids")
        else:
            tokens = tokenizer.encode(prompt)
        if not tokens and end_of_text is None:
            raise ValueError(
                f"{this} is empty, and there is no end-of-text token to begin with; pass end_of_text, or a prompt"
            )
        tokens = tokens or [end_of_text]
        if not (_are_whole(tokens) and min(tokens) >= 0 and max(tokens) < vocab_size):
            wrong = next(each for each in tokens if not _are_whole([each]) or not 0 <= each < vocab_size)
            raise ValueError(f"{this} has the token {wrong!r}; the model's are 0 to {vocab_size - 1}")
        if limit is not None and len(tokens) > limit:
            raise TooLong(f"{this} has {len(tokens):,} tokens, more than the model's {limit:,} positions; shorten it")
        read.append([int(token) for token in tokens])
    return read


def _are_whole(values: Any) -> bool:
    """Whether there are values, all of them whole numbers."""
    kinds = set(map(type, values))  # a request may have many thousand tokens: each is looked at once, by C
    return len(values) > 0 and all(hasattr(kind, "__index__") and not issubclass(kind, bool | Tensor) for kind in kinds)


SLOTS = 64  # sequences that are decoded at once unless told otherwise; the others wait for a slot
MAX_SEQUENCES = 100_000


class Token(NamedTuple):
    """One token that was made."""

    sequence: int  # the number of its sequence: those of the first prompt come first
    token: int
    logprob: float  # ln p of the token under the model itself, before temperature and filters
    text: str  # the text that became whole with it; empty without a tokenizer, and while a character lacks bytes
    finish_reason: FinishReason | None  # None while the sequence goes on


class Generated(NamedTuple):
    """What was made, one entry per sequence: n for the first prompt, then n for the second, ..."""

    tokens: list[list[int]]  # without the prompt; an end-of-text token is the last one
    logprobs: list[list[float]]  # ln p of each token under the model itself, before temperature and filters
    finish_reasons: list[FinishReason | None]  # None for a sequence that is not done
    texts: list[str]  # without the stop string and what follows it; empty without a tokenizer


class Generation(Iterator[Token]):
    """An iterator over tokens as they are made. `LanguageModel.stream` begins one, and says what its arguments are.

    Sequences that find no free slot wait until another one ends. Their number in the batch changes neither their random
    numbers nor, but for rounding, their probabilities; with batch_invariant they stay the same to the bit.

    Methods: `next()` and `for` give one Token after the other; `run()` makes all that are left; `result()` returns what
    there is so far; `capture()` makes it faster on a GPU. `done` says whether all sequences have ended.
    """

    def __init__(
        self,
        model: Network,
        prompts: Prompts,
        options: GenerateOptions,
        *,
        tokenizer: Tokenizer | None = None,
        slots: int = SLOTS,
        batch_invariant: bool = False,
    ) -> None:
        if slots < 1:
            raise ValueError(f"slots {slots} is not a number of sequences at a time; give 1 or more")
        if tokenizer is None and options.stop:
            raise ValueError("stop strings need a tokenizer that turns tokens into text; give tokenizer=...")
        if tokenizer is not None and tokenizer.vocab_size > model.config.vocab_size:
            raise ValueError(
                f"the tokenizer {tokenizer.name} has {tokenizer.vocab_size:,} tokens and the model "
                f"{model.config.vocab_size:,}: it is not the one that the model was trained with"
            )
        if tokenizer is not None and options.end_of_text is None:
            options = replace(options, end_of_text=tokenizer.end_of_text)
        read = read_prompts(prompts, tokenizer, model.config, options.end_of_text)
        job = Job(read, options)
        if job.count > MAX_SEQUENCES:
            message = f"{job.count:,} sequences (prompts times n) are more than the {MAX_SEQUENCES:,} that are possible"
            raise ValueError(f"{message}; give fewer")
        self.tokenizer, self.options, self.batch_invariant = tokenizer, options, batch_invariant
        self.prompts = [prompt for prompt in read for _ in range(options.n)]  # one per sequence
        capacity = max(map(len, read)) + min(options.max_tokens, FIRST_CAPACITY)
        self.slots = min(slots, job.count)  # sequences that are decoded at once
        make = InvariantDecoder if batch_invariant else Decoder
        self._scheduler = Scheduler(make(model, self.slots, capacity=capacity))
        self._written = Written(tokenizer, self._scheduler.stop, self._scheduler.cancel)
        self._scheduler.add(job)
        self._written.add(job)
        self._ready: deque[Token] = deque()
        self._made: list[list[Token]] = [[] for _ in self.prompts]

    @property
    def done(self) -> bool:
        """Whether all sequences have ended. The iterator may have tokens left that it has not returned."""
        return not self._scheduler.busy

    @property
    def state_bytes(self) -> int:
        """Bytes that the states of all slots take."""
        return self._scheduler.decoder.state_bytes

    def __next__(self) -> Token:
        while not self._ready:
            if self.done:
                raise StopIteration
            self.advance()
        return self._ready.popleft()

    def run(self) -> Generated:
        """Make all tokens that are left and return everything."""
        while not self.done:
            self.advance()
        return self.result()

    def advance(self, on_prefill: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Make the next token of every sequence that is in a slot, after waiting ones have taken the free slots.

        `on_prefill(done, total)` is called after each chunk of prompts that is read, with numbers of their tokens.
        """
        for _, event in self._written.take(self._scheduler.step(on_prefill)):
            if isinstance(event, Made):
                ((token, logprob, _),) = event.scored  # without a lag each step makes one
                made = Token(event.sequence, token, logprob or 0.0, event.text, event.finish_reason)
                self._made[made.sequence].append(made)
                self._ready.append(made)
            elif isinstance(event, Failed) and event.error is not None:
                raise event.error

    def capture(self) -> "Generation":
        """Replay steps as CUDA graphs from now on, which on a GPU is many times faster. Returns itself.

        The tokens and log-probabilities stay the same. A model with caches that grow (softmax attention, Hyena), and
        one whose step cannot be captured, goes on without. While a step is captured, no other thread should use the
        GPU. ValueError if the model is not on a GPU.
        """
        decoder = self._scheduler.decoder
        if not (decoder.tokens.device.type == "cuda" and decoder.has_caches):
            decoder.capture_steps(required=False)  # an error where there is no GPU
        return self

    def result(self) -> Generated:
        """Return what has been made so far."""
        return Generated(
            tokens=[[each.token for each in made] for made in self._made],
            logprobs=[[each.logprob for each in made] for made in self._made],
            finish_reasons=[made[-1].finish_reason if made else None for made in self._made],
            texts=["".join(each.text for each in made) for made in self._made],
        )
