"""Compositional MQAR: a key is a pair of two tokens, each of which belongs to several keys."""

import math

import torch
from pydantic import Field
from torch import Generator

from rebased.tasks.contract import Examples, Split, register_task
from rebased.tasks.draws import draw_distinct
from rebased.tasks.mqar import MQAR


@register_task("compositional_mqar")
class CompositionalMQAR(MQAR):
    """A sequence begins with triples: two tokens, which are the key together, and a value. Later each key comes again,
    and the model must say its value. Each of its tokens belongs to several keys, so both must be looked at (zoology).

    n = m^2: m first tokens and m second tokens, all their pairs in random order, each with its own value. The first
    third of the vocabulary are first tokens (0 apart), the second third second ones, the rest values. T tokens: n
    triples k1 k2 v, then a query area of (T - 3n) // 3 slots of three, drawn as in MQAR: k1, k2, labelled with the
    value, and filler. With m = 1 and 12 tokens, T = 9:

        inputs  2 5 9 0 0 0 2 5 0
        labels  . . . . . . . 9 .
    """

    sizes = {
        "quick": {"seq_len": 24, "kv_pairs": 4, "vocab_size": 24, "train": 8_000, "test": 500},
        "paper": {"seq_len": 256, "kv_pairs": 36, "vocab_size": 8192, "train": 100_000, "test": 3_000},
    }

    kv_pairs: int = Field(36, description="pairs n of tokens with a value, a square, at most seq_len / 6")

    def _check_sizes(self) -> None:
        n = self.kv_pairs
        if n < 1 or math.isqrt(n) ** 2 != n:
            raise ValueError(f"kv_pairs must be a square, because every first token has every second one; got {n}")
        if 6 * n > self.seq_len:
            raise ValueError(f"kv_pairs={n} needs {6 * n} tokens (6 per pair), but seq_len is {self.seq_len}")
        if self.vocab_size // 3 <= n:
            raise ValueError(f"vocab_size {self.vocab_size} is too small for {n} pairs; use at least {3 * n + 3}")

    @property
    def first_value(self) -> int:
        return 2 * (self.vocab_size // 3)

    @property
    def n_slots(self) -> int:
        return (self.seq_len - 3 * self.kv_pairs) // 3

    @property
    def context_length(self) -> int:
        """Positions of the triples, which come first."""
        return 3 * self.kv_pairs

    def count(self) -> int:
        n, third = self.kv_pairs, self.vocab_size // 3
        m = math.isqrt(n)
        keys = math.comb(third - 1, m) * math.comb(third, m) * math.factorial(n)
        return keys * math.perm(self.vocab_size - self.first_value, n) * math.perm(self.n_slots, n)

    def draw(self, rows: int, generator: Generator, split: Split) -> Examples:
        n, m, third = self.kv_pairs, math.isqrt(self.kv_pairs), self.vocab_size // 3
        first = 1 + draw_distinct(rows, m, third - 1, generator)
        second = third + draw_distinct(rows, m, third, generator)
        pair = draw_distinct(rows, n, n, generator)  # [rows,n]: which pair stands where
        values = self.first_value + draw_distinct(rows, n, self.vocab_size - self.first_value, generator)
        triples = torch.stack([first.gather(1, pair // m), second.gather(1, pair % m), values], dim=2)
        inputs, labels, _ = self._ask(triples, triples[:, :, :2], values, generator)
        return Examples(inputs, labels)
