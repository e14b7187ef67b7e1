"""A generation under way: prompts of different lengths become sequences, which take slots, get tokens and end."""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from rebased.data.detokenize import StopStrings, TextStream
from rebased.data.tokenizer import Tokenizer
from rebased.models.decoder import FIRST_CAPACITY, Decoder
from rebased.models.invariant_decoder import InvariantDecoder
from rebased.models.language_model import LanguageModel, LMState
from rebased.models.prompts import Prompts, read_prompts
from rebased.models.sampling import Sampling

SLOTS = 64  # sequences that are decoded at once unless told otherwise; the others wait for a slot
MAX_SEQUENCES = 100_000

FinishReason = Literal["stop", "length"]
"""Why a sequence ended, in OpenAI's words. "stop": the end-of-text token or a stop string. "length": max_tokens are
made, or the model has no more positions."""


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


@dataclass(frozen=True)
class Ending:
    """When a sequence ends."""

    max_tokens: int = 256  # tokens that are made at most
    stop: tuple[str, ...] = ()  # strings that end a sequence; they need a tokenizer
    end_of_text: int | None = None  # the token that ends a text, and begins one
    ignore_end_of_text: bool = False  # whether sequences go on after that token

    def __post_init__(self) -> None:
        if isinstance(self.max_tokens, bool) or not isinstance(self.max_tokens, int) or self.max_tokens < 1:
            raise ValueError(f"max_tokens {self.max_tokens!r} is not a number of tokens; give 1 or more")
        if isinstance(self.stop, str):
            raise ValueError(f"stop {self.stop!r} should be a list of strings; write [{self.stop!r}]")
        StopStrings(self.stop)


@dataclass
class Progress:
    """One sequence: what it began with, what it has got, and where it is."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    slot: int | None = None  # where it is, or was at its end; None before it begins
    delivered: int = 0  # how many of the tokens the iterator has returned

    @property
    def in_slot(self) -> bool:
        """Whether steps give it tokens: it has begun and not ended."""
        return self.slot is not None and self.finish_reason is None


class Snapshot(NamedTuple):
    """A generation between two steps, as plain values: enough to go on, here or elsewhere."""

    sampling: Sampling
    ending: Ending
    slots: int
    sequences: list[Progress]
    states: dict[int, LMState]  # of each sequence in a slot, and of ended ones if kept: after all tokens but the last
    keep_states: bool = False  # whether states of sequences that end with "length" are kept, for `go_on`
    batch_invariant: bool = False  # whether no sequence depends on the others, to the bit


class Generation(Iterator[Token]):
    """An iterator over tokens as they are made. `LanguageModel.stream` begins one.

    Sequences that find no free slot wait until another one ends. Their number in the batch changes neither their random
    numbers nor, but for rounding, their probabilities; with batch_invariant they stay the same to the bit.

    Methods: `next()` and `for` give one Token after the other; `run()` makes all that are left; `result()` returns what
    there is so far; `fork()` returns an independent copy; `go_on(n)` lets sequences that are at max_tokens get n more;
    `save_generation` and `load_generation` keep it in a file; `capture()` makes it faster on a GPU. `done` says whether
    all sequences have ended.
    """

    def __init__(self, model: LanguageModel, snapshot: Snapshot, tokenizer: Tokenizer | None = None) -> None:
        if snapshot.ending.stop and tokenizer is None:
            raise ValueError("stop strings need a tokenizer that turns tokens into text; give tokenizer=...")
        self.model, self.tokenizer = model, tokenizer
        self.sampling, self.ending = snapshot.sampling, snapshot.ending
        self.sequences = snapshot.sequences
        longest = max(len(each.prompt) + len(each.tokens) for each in self.sequences)
        room = min(self.ending.max_tokens, FIRST_CAPACITY)
        self.batch_invariant = snapshot.batch_invariant
        make = InvariantDecoder if snapshot.batch_invariant else Decoder
        self._decoder = make(model, snapshot.slots, capacity=longest + room)
        self._limit = model.config.length_limit or math.inf
        self._texts = [TextStream(tokenizer, self.ending.stop) for _ in self.sequences]
        self._ready: deque[Token] = deque()
        prompts = [each.prompt for each in self.sequences]
        together = 0 if snapshot.batch_invariant else self._decoder.prefill_chunk
        self._group_of = group_prompts(prompts, snapshot.slots, together)
        self._last_prefill: tuple[range, dict[int, LMState]] | None = None
        self._keep_states, self._kept = snapshot.keep_states, dict(snapshot.states)
        self._running: dict[int, int] = {}  # slot -> number of the sequence in it
        for number, sequence in enumerate(self.sequences):
            self._replay(number, sequence)
            if sequence.slot is not None and sequence.finish_reason is None:
                self._put(sequence.slot, number, self._kept.pop(number))
        self._wait()

    @property
    def done(self) -> bool:
        """Whether all sequences have ended. The iterator may have tokens left that it has not returned."""
        return not self._running and not self._waiting

    def __next__(self) -> Token:
        while not self._ready:
            if self.done:
                raise StopIteration
            self.advance()
        token = self._ready.popleft()
        self.sequences[token.sequence].delivered += 1
        return token

    def run(self) -> Generated:
        """Make all tokens that are left and return everything."""
        while not self.done:
            self.advance()
        return self.result()

    def advance(self, on_prefill: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Make the next token of every sequence that is in a slot, after waiting ones have taken the free slots.

        `on_prefill(done, total)` is called after each chunk of a prompt that is read, with numbers of its tokens.
        """
        self._fill(on_prefill)
        made = self._decoder.step()
        tokens, logprobs = made.tokens.tolist(), made.logprobs.tolist()
        for number, slot in sorted((number, slot) for slot, number in self._running.items()):
            self._take(number, self.sequences[number], tokens[slot], logprobs[slot])

    def capture(self) -> "Generation":
        """Replay steps as CUDA graphs from now on, which on a GPU is many times faster. Returns itself.

        The tokens and log-probabilities stay the same. A model with caches that grow (softmax attention, Hyena), and
        one whose step cannot be captured, goes on without. While a step is captured, no other thread should use the
        GPU. ValueError if the model is not on a GPU.
        """
        on_gpu = self._decoder.tokens.device.type == "cuda"
        if not (on_gpu and self._decoder.has_caches):
            self._decoder.capture_steps(required=False)  # an error where there is no GPU
        return self

    def go_on(self, max_tokens: int) -> None:
        """Let each sequence that has as many tokens as it may get `max_tokens` more, with the state that was kept.

        It needs `keep_states`. The tokens are those of one generation with the larger number. So are the
        log-probabilities, to the bit where all sequences have a slot; one that had to wait may get another slot, whose
        row is rounded differently.
        """
        if not self._keep_states:
            raise ValueError("the states of sequences that have ended were not kept; begin with keep_states=True")
        before = self.ending.max_tokens
        self.ending = replace(self.ending, max_tokens=before + Ending(max_tokens).max_tokens)
        for number, sequence in enumerate(self.sequences):
            has_room = len(sequence.prompt) + before <= self._limit
            if sequence.finish_reason == "length" and len(sequence.tokens) == before and has_room:
                sequence.finish_reason = None
                if sequence.slot is None or sequence.slot in self._running:
                    sequence.slot = None
                else:
                    self._put(sequence.slot, number, self._kept.pop(number))
        self._wait()

    def result(self) -> Generated:
        """Return what has been made so far."""
        return Generated(
            tokens=[list(sequence.tokens) for sequence in self.sequences],
            logprobs=[list(sequence.logprobs) for sequence in self.sequences],
            finish_reasons=[sequence.finish_reason for sequence in self.sequences],
            texts=[self._whole_text(number) for number in range(len(self.sequences))],
        )

    def snapshot(self) -> Snapshot:
        """Return copies of all that is needed to go on from here."""
        sequences = [
            replace(each, prompt=list(each.prompt), tokens=list(each.tokens), logprobs=list(each.logprobs))
            for each in self.sequences
        ]
        states = self._kept | {number: self._decoder.get(slot) for slot, number in self._running.items()}
        flags = (self._keep_states, self.batch_invariant)
        return Snapshot(self.sampling, self.ending, self._decoder.slots, sequences, states, *flags)

    def fork(self, seed: int | None = None) -> "Generation":
        """Return an independent copy that goes on from here: with the same random numbers, or with those of `seed`."""
        here = self.snapshot()
        if seed is not None:
            here = here._replace(sampling=replace(here.sampling, seed=seed))
        return Generation(self.model, here, self.tokenizer)

    @property
    def slots(self) -> int:
        """How many sequences are decoded at once."""
        return self._decoder.slots

    @property
    def state_bytes(self) -> int:
        """Bytes that the states of all slots take."""
        return self._decoder.state_bytes

    def _fill(self, on_prefill: Callable[[int, int], None]) -> None:
        """Let waiting sequences take the free slots."""
        for slot in range(self._decoder.slots if self._waiting else 0):
            if slot not in self._running and self._waiting:
                number = self._waiting[0]
                state = self._kept.pop(number, None) or self._prefill(number, on_prefill)
                self._put(slot, number, state)
                self._waiting.popleft()  # last: an interrupted prefill changes nothing

    def _wait(self) -> None:
        """Let all sequences wait that are to go on and are in no slot."""
        self._waiting = deque(
            number
            for number, sequence in enumerate(self.sequences)
            if sequence.slot is None and sequence.finish_reason is None
        )

    def _prefill(self, number: int, on_prefill: Callable[[int, int], None]) -> LMState:
        """Return the state after all tokens of a sequence's prompt but the last.

        The prompts of its group are read with it. The group does not depend on how far the generation is, so one that
        is saved and loaded reads the same prompts together, and gets the same numbers to the bit.
        """
        group = self._group_of[number]
        if self._last_prefill is None or self._last_prefill[0] != group:
            first: dict[tuple[int, ...], int] = {}  # the n sequences of a prompt share its state
            owner = {each: first.setdefault(tuple(self.sequences[each].prompt), each) for each in group}
            prompts = {each: self.sequences[each].prompt for each in first.values()}
            if len(prompts) > 1 and isinstance(self._decoder, Decoder):
                states = self._decoder.prefill_together([prompt[:-1] for prompt in prompts.values()])
                on_prefill(total := sum(map(len, prompts.values())), total)
            else:
                (prompt,) = prompts.values()
                states = [self.model.init_state(1)]
                for states[0] in self._decoder.prefill_chunks(prompt[:-1]):
                    on_prefill(states[0].position, len(prompt))
            found = dict(zip(prompts, states, strict=True))
            self._last_prefill = group, {each: found[owner[each]] for each in group}
        return self._last_prefill[1][number]

    def _put(self, slot: int, number: int, state: LMState) -> None:
        sequence = self.sequences[number]
        self._decoder.put(
            slot,
            [*sequence.prompt, *sequence.tokens],
            state,
            self.sampling,
            sequence=number,
            drawn=len(sequence.tokens),
        )
        self._running[slot], sequence.slot = number, slot

    def _take(self, number: int, sequence: Progress, token: int, logprob: float) -> None:
        """Give a sequence its next token, and end it where that is due."""
        if not math.isfinite(logprob):
            raise ValueError(
                f"the model's logits are not finite after {len(sequence.prompt) + len(sequence.tokens)} tokens: it has "
                "diverged in training, or its precision is too low"
            )
        sequence.tokens.append(token)
        sequence.logprobs.append(logprob)
        text = self._text_of(number, sequence, len(sequence.tokens))
        if sequence.finish_reason is not None and sequence.slot is not None:
            if self._keep_states and sequence.finish_reason == "length":
                self._kept[number] = self._decoder.get(sequence.slot)
            self._decoder.free(sequence.slot)
            del self._running[sequence.slot]
        self._ready.append(Token(number, token, logprob, text, sequence.finish_reason))

    def _text_of(self, number: int, sequence: Progress, count: int) -> str:
        """Return the text of token number `count` (from 1) of a sequence, and set its finish_reason if it is over."""
        token, text = sequence.tokens[count - 1], self._texts[number]
        is_end = token == self.ending.end_of_text
        piece = "" if is_end else text.push(token)
        if (is_end and not self.ending.ignore_end_of_text) or text.stopped:
            sequence.finish_reason = "stop"
        elif count >= self.ending.max_tokens or len(sequence.prompt) + count > self._limit:
            sequence.finish_reason = "length"
        if sequence.finish_reason is None or (self._keep_states and sequence.finish_reason == "length"):
            return piece  # what is held may become whole when the sequence goes on
        return piece + text.finish()

    def _whole_text(self, number: int) -> str:
        """Return the text of a sequence so far; if it has ended, with what is held for when it goes on."""
        sequence, text = self.sequences[number], self._texts[number]
        if not self._keep_states or sequence.finish_reason != "length":
            return text.passed
        whole = TextStream(self.tokenizer, self.ending.stop)
        for token in sequence.tokens:
            if token != self.ending.end_of_text:
                whole.push(token)
        whole.finish()
        return whole.passed

    def _replay(self, number: int, sequence: Progress) -> None:
        """Find the text of the tokens that a sequence has, and queue those that were not returned yet."""
        wanted, sequence.finish_reason = sequence.finish_reason, None
        for count, (token, logprob) in enumerate(zip(sequence.tokens, sequence.logprobs, strict=True), 1):
            text = self._text_of(number, sequence, count)
            if count > sequence.delivered:
                self._ready.append(Token(number, token, logprob, text, sequence.finish_reason))
        if sequence.finish_reason != wanted:
            raise ValueError(
                f"sequence {number + 1} of {len(self.sequences)} ended with {wanted!r} when it was saved, and with "
                f"{sequence.finish_reason!r} here: the tokenizer is another one"
            )


def group_prompts(prompts: Sequence[list[int]], slots: int, chunk: int) -> list[range]:
    """Return for each sequence the numbers of those whose prompts are read together with its own, in one pass.

    They are neighbours, with at most `slots` different prompts and `chunk` tokens; a longer prompt is read alone.
    """
    groups: list[range] = []
    begin = 0
    while begin < len(prompts):
        end, different, tokens = begin, set[tuple[int, ...]](), 0
        while end < len(prompts):
            prompt = tuple(prompts[end])
            if prompt not in different:
                if different and (len(different) == slots or tokens + len(prompt) > chunk):
                    break
                different.add(prompt)
                tokens += len(prompt)
            end += 1
        groups += [range(begin, end)] * (end - begin)
        begin = end
    return groups


def begin(
    model: LanguageModel,
    prompts: Prompts,
    sampling: Sampling,
    ending: Ending,
    *,
    n: int = 1,
    slots: int = SLOTS,
    tokenizer: Tokenizer | None = None,
    keep_states: bool = False,
    batch_invariant: bool = False,
) -> Generation:
    """Return the generation of n sequences per prompt, at most `slots` at a time. See LanguageModel.stream."""
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ValueError(f"n {n!r} is not a number of sequences per prompt; give 1 or more")
    if slots < 1:
        raise ValueError(f"slots {slots} is not a number of sequences at a time; give 1 or more")
    if tokenizer is not None and tokenizer.vocab_size > model.config.vocab_size:
        raise ValueError(
            f"the tokenizer {tokenizer.name} has {tokenizer.vocab_size:,} tokens and the model "
            f"{model.config.vocab_size:,}: it is not the one that the model was trained with"
        )
    if ending.end_of_text is None and tokenizer is not None:
        ending = replace(ending, end_of_text=tokenizer.end_of_text)
    read = read_prompts(prompts, tokenizer, model, ending.end_of_text)
    if len(read) * n > MAX_SEQUENCES:
        raise ValueError(
            f"{len(read) * n:,} sequences (prompts times n) are more than the {MAX_SEQUENCES:,} that are possible; "
            "give fewer"
        )
    sequences = [Progress(prompt) for prompt in read for _ in range(n)]
    here = Snapshot(sampling, ending, min(slots, len(sequences)), sequences, {}, keep_states, batch_invariant)
    return Generation(model, here, tokenizer)
