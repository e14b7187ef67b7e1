"""How the next token is chosen: greedy, or drawn after temperature, top-k, top-p, min-p and a repetition penalty.

Everything runs on the device of the logits and never waits for it, so that a CUDA graph can hold it. A draw is a
function of (seed, sequence, how many tokens it has drawn): there is no generator whose state could be lost, and what a
sequence gets does not depend on the others in its batch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from rebased.ops.backend import to_device

GAMMA = 0x9E3779B97F4A7C15  # the step of splitmix64
MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))  # its finaliser: shifts and factors
UNIT = 2.0**40  # weights are drawn as whole numbers: their sums are exact, in any order, on any device

Mode = Literal["greedy", "draw", "filter"]
"""What the rows of a batch need at most: no draw, a draw, or a draw from the tokens that filters leave."""
MODES: tuple[Mode, ...] = ("greedy", "draw", "filter")


FLOAT = (int, float)
RANGES: tuple[tuple[str, Any, float, float, str], ...] = (  # setting, type, lowest, highest, remedy
    ("temperature", FLOAT, 0, 1e4, "0 (greedy) or more, at most 10,000"),
    ("top_p", FLOAT, math.ulp(0.0), 1, "a probability above 0, at most 1 (all tokens)"),
    ("min_p", FLOAT, 0, 1, "a share from 0 (all tokens) to 1"),
    ("repetition_penalty", FLOAT, 1e-3, 1e3, "0.001 to 1000 (1: none)"),
    ("top_k", int, 0, 2**31 - 1, "a number of tokens, or 0 for all"),
    ("seed", int, 0, 2**63 - 1, "0 to 2^63 - 1"),
)


@dataclass(frozen=True)
class Sampling:
    """How the next token of a sequence is chosen. The defaults draw from the model's own distribution.

    The steps are those of Hugging Face's `generate`, in its order: repetition penalty, temperature, top-k, top-p,
    min-p.

    Args:
        temperature: logits are divided by it; 0 always takes the most probable token. Default 1.
        top_k: only the k most probable tokens can be drawn; 0 means all. Tokens as probable as the last one stay too.
        top_p: only the most probable tokens that together reach this probability can be drawn, in (0, 1]. Default 1.
        min_p: only tokens with at least this share of the largest probability can be drawn, in [0, 1]. Default 0.
        repetition_penalty: logits of tokens that are in the sequence, prompt included, are divided by it if they are
            positive, and multiplied otherwise. Default 1: no penalty.
        seed: of the draws, 0 to 2^63 - 1. Default 0.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, kind, lowest, highest, remedy in RANGES:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, kind) or value != value or abs(value) == math.inf:
                raise ValueError(f"{name} {value!r} is not a {'whole ' if kind is int else ''}number")
            if not lowest <= value <= highest:
                raise ValueError(f"{name} {value} is out of range; give {remedy}")

    @property
    def is_greedy(self) -> bool:
        """Whether the most probable token is always taken: below 1e-5 scaled logits would overflow."""
        return self.temperature < 1e-5

    @property
    def mode(self) -> Mode:
        """What choosing a token needs."""
        if self.is_greedy:
            return "greedy"
        return "filter" if self.top_k > 0 or self.top_p < 1 or self.min_p > 0 else "draw"


class SlotSampling:
    """The sampling of sequence number `sequence` of a seed, whose tokens so far, the prompt's too, are `tokens`."""

    def __init__(self, sampling: Sampling, tokens: Sequence[int], sequence: int) -> None:
        self.sampling, self.tokens = sampling, tokens
        self.key = stream_key(sampling.seed, sequence)
        temperature = 0.0 if sampling.is_greedy else sampling.temperature
        self.numbers = (temperature, sampling.top_p, sampling.min_p, sampling.repetition_penalty)


class SamplingSlots:
    """The sampling of S sequences as tensors on a device: settings, random streams, and which tokens have been seen."""

    def __init__(self, count: int, vocab_size: int, device: torch.device) -> None:
        self._modes = np.zeros(count, dtype=np.int8)  # what each slot needs, as its place in MODES
        self.temperature = torch.zeros(count, device=device)
        self.top_k = torch.full((count,), vocab_size, device=device)
        self.top_p = torch.ones(count, device=device)
        self.min_p = torch.zeros(count, device=device)
        self.penalty = torch.ones(count, device=device)
        self.key = torch.zeros(count, dtype=torch.int64, device=device)  # of the random stream
        self.drawn = torch.zeros(count, dtype=torch.int64, device=device)  # tokens drawn from it so far
        self.seen = torch.zeros(count, vocab_size, dtype=torch.bool, device=device)
        self._rows = torch.arange(count, device=device)

    def put(self, slots: Sequence[int], given: Sequence["SlotSampling"]) -> None:
        """Set some slots. The host does not wait for the device."""
        self._modes[slots] = [MODES.index(each.sampling.mode) for each in given]
        vocab_size, device = self.seen.shape[1], self.seen.device
        index = to_device(slots, torch.int64, device)
        numbers = to_device([each.numbers for each in given], torch.float32, device)
        fractions = (self.temperature, self.top_p, self.min_p, self.penalty)
        for mine, column in zip(fractions, numbers.unbind(1), strict=True):
            mine.index_copy_(0, index, column)
        ranks = [min(each.sampling.top_k or vocab_size, vocab_size) for each in given]
        whole = to_device([(rank, each.key) for rank, each in zip(ranks, given, strict=True)], torch.int64, device)
        for mine, column in zip((self.top_k, self.key), whole.unbind(1), strict=True):
            mine.index_copy_(0, index, column)
        self.drawn.index_fill_(0, index, 0)
        for slot, each in zip(slots, given, strict=True):
            if each.sampling.repetition_penalty != 1:  # nothing else reads it
                self.seen[slot] = False
                self.seen[slot, to_device(each.tokens, torch.int64, device)] = True

    def clear(self, slot: int) -> None:
        """Say that nobody uses a slot: it then needs no draw."""
        self._modes[slot] = 0

    @property
    def mode(self) -> Mode:
        """What the slots need at most."""
        return MODES[self._modes.max()]

    def choose(self, logits: Tensor, mode: Mode) -> Tensor:
        """Return the next token of each slot, [S] int64, from logits [S,V]; `mode` is at least that of the slots."""
        scores = logits if logits.dtype == torch.float64 else logits.float()
        penalty = self.penalty.unsqueeze(1)
        scores = torch.where(self.seen, torch.where(scores > 0, scores / penalty, scores * penalty), scores)
        best = scores.argmax(-1)
        if mode == "greedy":
            return best
        is_greedy = self.temperature == 0
        scores = scores / torch.where(is_greedy, 1.0, self.temperature).unsqueeze(1)
        if mode == "filter":
            lowest = lowest_score(scores, self.top_k, self.top_p, self.min_p)
            scores = scores.masked_fill(scores < lowest.unsqueeze(1), -torch.inf)
        return torch.where(is_greedy, best, draw(scores, uniform(self.key, self.drawn)))

    def part(self, start: int, stop: int) -> "SamplingSlots":
        """Return some of the slots, which share their memory with these."""
        part = object.__new__(SamplingSlots)
        for name, value in vars(self).items():
            setattr(part, name, value[start:stop] if isinstance(value, Tensor) else value)
        part._rows = self._rows[: stop - start]
        return part

    def advance(self, tokens: Tensor, active: Tensor) -> None:
        """Note that the active slots, bool [S], have got these tokens [S]."""
        self.drawn.add_(active)
        self.seen[self._rows, tokens] |= active


def lowest_score(scores: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Return the score [S] below which tokens are left out, from scores [S,V] and the settings [S] of each row."""
    ranked = scores.sort(-1, descending=True).values
    rank = torch.arange(ranked.shape[1], device=scores.device)
    ranked = ranked.masked_fill(rank >= top_k.unsqueeze(1), -torch.inf)
    shares = ranked.softmax(-1)
    before = shares.cumsum(-1) - shares  # the probability of all tokens that are more probable
    top_p = top_p.where(top_p < 1, torch.inf).unsqueeze(1)  # rounded sums may pass 1
    kept = (before < top_p) & (shares >= min_p.unsqueeze(1) * shares[:, :1])
    count = torch.minimum(kept.sum(-1), top_k).clamp(min=1)  # shares fall, so the kept ones come first
    last = count - 1  # none is kept if top_p is so small that it is zero here; then the first is
    return ranked.gather(1, last.unsqueeze(1)).squeeze(1)


def draw(scores: Tensor, u: Tensor) -> Tensor:
    """Return the token [S] at which the distribution softmax(scores [S,V]) passes u [S], in the order of token ids."""
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    totals = (weights.double() * UNIT).long().cumsum(-1)  # [S,V]; tokens below 1e-12 of the largest weigh nothing
    place = (u * totals[:, -1].double()).long()  # in [0, total)
    return torch.searchsorted(totals, place.unsqueeze(1), right=True).squeeze(1).clamp(max=scores.shape[1] - 1)


def uniform(key: Tensor, drawn: Tensor) -> Tensor:
    """Return number `drawn` [S] of the random streams `key` [S] (int64): fp64 in [0, 1), the same on every device."""
    x = key + (drawn + 1) * _signed(GAMMA)
    for shift, factor in MIX:
        x = (x ^ _shifted(x, shift)) * _signed(factor)
    return _shifted(x ^ _shifted(x, 31), 11).double() * 2.0**-53


def stream_key(seed: int, sequence: int) -> int:
    """Return the key, a signed 64-bit number, of the random stream of one sequence of a seed."""
    return _signed(_mix(_mix(seed + GAMMA) + (sequence + 1) * GAMMA))


def _mix(x: int) -> int:
    """The finaliser of splitmix64 on whole numbers modulo 2^64."""
    x %= 2**64
    for shift, factor in MIX:
        x = ((x ^ (x >> shift)) * factor) % 2**64
    return x ^ (x >> 31)


def _signed(x: int) -> int:
    """A number modulo 2^64 as torch's int64 holds it."""
    x %= 2**64
    return x - 2**64 if x >= 2**63 else x


def _shifted(x: Tensor, bits: int) -> Tensor:
    """x shifted to the right as if it had no sign: torch's shift repeats the sign."""
    return (x >> bits) & (2 ** (64 - bits) - 1)
