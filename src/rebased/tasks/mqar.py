"""Multi-query associative recall: read pairs of keys and values, then say the value of each key that is asked for.

One example of T tokens: k1 v1 k2 v2 ... kn vn, then a query area of S = (T - 2n) / 2 slots of two positions each.
A slot that is drawn holds a key, and the label *at that same position* is the key's value. All else is filler.
"""

import math
from typing import Annotated, NamedTuple

import torch
from pydantic import Field, model_validator
from torch import Generator, Tensor

from rebased.config import Config
from rebased.tasks.seeds import mix_seed

FILLER = 0
IGNORED = -100  # the label of a position that is not asked for; what cross_entropy ignores by default
PAIRS_BY_LENGTH = {128: 16, 256: 64, 512: 128, 1024: 256, 2048: 512}  # the paper's Figure 1
BLOCK_ROWS = 1024  # rows are made so many at a time: it bounds the scratch memory

Alpha = Annotated[float, Field(gt=0, allow_inf_nan=False)]  # 0.01 in the paper; at 1 every slot is as likely


class Examples(NamedTuple):
    inputs: Tensor  # [N,T] int64
    labels: Tensor  # [N,T] int64, IGNORED where nothing is asked


def check_sizes(seq_len: int, kv_pairs: int, vocab_size: int) -> None:
    if seq_len % 2:
        raise ValueError(f"seq_len must be even, got {seq_len}: use {seq_len - 1} or {seq_len + 1}")
    if kv_pairs < 1:
        raise ValueError(f"kv_pairs must be at least 1, got {kv_pairs}")
    if 4 * kv_pairs > seq_len:
        raise ValueError(
            f"kv_pairs={kv_pairs} needs {4 * kv_pairs} tokens (4 a pair), but seq_len is {seq_len}: "
            f"use seq_len >= {4 * kv_pairs} or kv_pairs <= {seq_len // 4}"
        )
    if vocab_size <= seq_len:  # with 4n <= T this also leaves at least 2n - 1 keys and 2n values
        raise ValueError(f"vocab_size must exceed seq_len={seq_len}, got {vocab_size}: use at least {seq_len + 1}")


class MQAR(Config):
    """The task: kv_pairs pairs among seq_len tokens, slot g asked for with weight (g + 1) ** (alpha - 1)."""

    seq_len: int = 256
    kv_pairs: int = 64
    vocab_size: int = 8192
    alpha: Alpha = 0.01
    random_non_queries: bool = False  # fillers become uniform random tokens, keys and values among them

    @model_validator(mode="after")
    def _check(self) -> "MQAR":
        check_sizes(self.seq_len, self.kv_pairs, self.vocab_size)
        return self

    @property
    def n_slots(self) -> int:
        return (self.seq_len - 2 * self.kv_pairs) // 2

    def count(self) -> int:
        """How many different examples there are, fillers apart."""
        n, n_keys = self.kv_pairs, self.vocab_size // 2 - 1
        return math.perm(n_keys, n) * math.perm(self.vocab_size - 1 - n_keys, n) * math.perm(self.n_slots, n)

    def build(self, n_examples: int, seed: int, device: torch.device | str = "cpu") -> Examples:
        """n_examples rows, the same for the same seed on the same kind of device; fewer rows are a prefix of more."""
        if n_examples < 1:
            raise ValueError(f"n_examples must be at least 1, got {n_examples}")
        shape = (n_examples, self.seq_len)
        inputs = torch.full(shape, FILLER, dtype=torch.int64, device=device)
        labels = torch.full(shape, IGNORED, dtype=torch.int64, device=device)
        # Fillers have a generator of their own: with and without them a seed asks the same questions.
        drawing, filling = (Generator(device).manual_seed(mix_seed(seed, stream)) for stream in (0, 1))
        for x, y in zip(inputs.split(BLOCK_ROWS), labels.split(BLOCK_ROWS), strict=True):
            self._ask(x, y, drawing)
            if self.random_non_queries:
                noise = torch.randint(self.vocab_size, (BLOCK_ROWS, self.seq_len), generator=filling, device=device)
                x.copy_(torch.where(x == FILLER, noise[: len(x)], x))
        return Examples(inputs, labels)

    def _ask(self, inputs: Tensor, labels: Tensor, generator: Generator) -> None:
        """Write a block of rows in place. A last, shorter block draws as much as a full one: hence the prefix."""
        rows, n, first_value = len(inputs), self.kv_pairs, self.vocab_size // 2
        keys = 1 + _distinct(BLOCK_ROWS, n, first_value - 1, generator)[:rows]  # [rows,n] in 1 .. N/2 - 1
        values = first_value + _distinct(BLOCK_ROWS, n, self.vocab_size - first_value, generator)[:rows]
        queries = 2 * n + 2 * _slots(BLOCK_ROWS, n, self.n_slots, self.alpha, generator)[:rows]  # positions
        inputs[:, 0 : 2 * n : 2] = keys
        inputs[:, 1 : 2 * n : 2] = values
        inputs.scatter_(1, queries, keys)
        labels.scatter_(1, queries, values)


def _slots(rows: int, n: int, n_slots: int, alpha: float, generator: Generator) -> Tensor:
    """[rows,n] slots, drawn one after another without replacement, slot g with weight p_g = (g + 1) ** (alpha - 1).

    Of exponential clocks with rates p_g the order of ringing is that of successive draws: the n smallest of E_g / p_g,
    here of its logarithm, which no alpha over- or underflows. In fp64, where ties do not happen.
    """
    device = generator.device
    clock = torch.empty(rows, n_slots, dtype=torch.float64, device=device).exponential_(generator=generator).log_()
    clock -= (alpha - 1) * torch.arange(1, n_slots + 1, dtype=torch.float64, device=device).log()
    return clock.topk(n, dim=1, largest=False, sorted=True).indices


def _distinct(rows: int, n: int, size: int, generator: Generator) -> Tensor:
    """[rows,n] numbers below size, distinct in each row and in random order: a draw without replacement.

    Independent draws of which repeats are discarded are just that, and cost O(n log n) a row rather than O(size).
    """
    # Draws until n are distinct: a sum of n geometric variables. Four standard deviations more are seldom too few.
    misses = [i / (size - i) for i in range(n)]
    spare = sum(misses) + 4 * math.sqrt(sum(miss * (1 + miss) for miss in misses)) + 4
    draws = torch.randint(size, (rows, n + math.ceil(spare)), generator=generator, device=generator.device)
    ordered, order = draws.sort(dim=1, stable=True)  # stable: of equal draws the earliest comes first
    first = torch.ones_like(draws, dtype=torch.bool)
    first.scatter_(1, order[:, 1:], ordered[:, 1:] != ordered[:, :-1])
    rank = first.cumsum(1)  # the r-th distinct draw goes to column r - 1; repeats and the surplus to column n
    column = torch.where(first & (rank <= n), rank - 1, n)
    kept = draws.new_empty(rows, n + 1).scatter_(1, column, draws)[:, :n]
    short = (rank[:, -1] < n).nonzero().squeeze(1)
    if len(short):  # which rows fall short says nothing about which numbers they hold, so a new draw is fair
        kept[short] = _distinct(len(short), n, size, generator)
    return kept
