"""Overwriting: keys are written one to four times, in random order, and the last value of each is asked for."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from pydantic import Field, model_validator
from torch import Generator

from rebased.tasks.contract import Examples, Split, register_task
from rebased.tasks.draws import draw_distinct
from rebased.tasks.forgetting_mqar import ForgettingMQAR

MOST_UPDATES = 3  # of one key


@register_task("overwriting")
class Overwriting(ForgettingMQAR):
    """A sequence writes values to keys, in random order and some keys several times. Later every key is asked for, and
    the model must say its last value. In forgetting MQAR new values come after all others, so a position tells them
    apart; here an old value of one key may come after the last value of another. Take `positions: none`.

    One example of T tokens: n keys and w = n + updates writes of two tokens, each key once and up to three times more;
    then the query area of MQAR with (T - 2w) / 2 slots. The w values are distinct. The slices are "updated", the keys
    that were written more than once, and "kept", the others. With T = 12, n = 2, one update and 16 tokens:

        inputs  3 9 3 12 5 8 3  0 0 0 5 0
        labels  . . .  . . . 12 . . . 8 .
    """

    sizes: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "quick": {"seq_len": 20, "kv_pairs": 3, "updates": 3, "vocab_size": 32, "train": 8_000, "test": 500},
        "paper": {"seq_len": 256, "kv_pairs": 32, "updates": 32, "vocab_size": 8192, "train": 100_000, "test": 3_000},
    }

    kv_pairs: int = Field(16, description="keys n")
    updates: int = Field(16, description="further writes, at most three of one key")

    @model_validator(mode="after")
    def _check(self) -> "Overwriting":
        n, u = self.kv_pairs, self.updates
        if not 0 <= u <= MOST_UPDATES * n:
            raise ValueError(f"updates must lie between 0 and {MOST_UPDATES} kv_pairs = {MOST_UPDATES * n}; got {u}")
        if 4 * n + 2 * u > self.seq_len:
            raise ValueError(
                f"kv_pairs={n} and updates={u} need {4 * n + 2 * u} tokens (4 per key, 2 per update), but seq_len is "
                f"{self.seq_len}: use seq_len >= {4 * n + 2 * u}, or fewer keys or updates"
            )
        self._check_sizes()
        return self

    def count(self) -> int:
        n, writes = self.kv_pairs, self.kv_pairs + self.updates
        orders = [1] + [0] * writes  # by length: orders of writes of so many keys, each one to four times
        for _ in range(n):
            orders = [
                sum(math.comb(length, m) * orders[length - m] for m in range(1, min(MOST_UPDATES + 1, length) + 1))
                for length in range(writes + 1)
            ]
        keys = math.comb(self.first_value - 1, n) * orders[writes]
        values = math.perm(self.vocab_size - self.first_value, writes)
        return keys * values * math.perm(self.n_slots, n)

    def draw(self, rows: int, generator: Generator, split: Split) -> Examples:
        n, u = self.kv_pairs, self.updates
        writes = n + u
        keys = 1 + draw_distinct(rows, n, self.first_value - 1, generator)  # [rows,n]
        values = self.first_value + draw_distinct(rows, writes, self.vocab_size - self.first_value, generator)
        first = torch.arange(n, device=keys.device).expand(rows, n)
        again = draw_distinct(rows, u, MOST_UPDATES * n, generator) // MOST_UPDATES  # each key has three lots
        order = draw_distinct(rows, writes, writes, generator)
        which = torch.cat([first, again], dim=1).gather(1, order)  # [rows,writes]: the key of each write
        times = torch.zeros_like(keys).scatter_add_(1, which, torch.ones_like(which))
        last = torch.zeros_like(keys).scatter_reduce_(
            1, which, torch.arange(writes, device=keys.device).expand(rows, writes), "amax", include_self=False
        )
        pairs, answers = torch.stack([keys.gather(1, which), values], dim=2), values.gather(1, last)
        inputs, labels, queries = self._ask(pairs, keys.unsqueeze(2), answers, generator)
        updated = inputs.new_zeros(inputs.shape).bool().scatter(1, queries, times > 1)
        kept = inputs.new_zeros(inputs.shape).bool().scatter(1, queries, times == 1)
        return Examples(inputs, labels, {"updated": updated, "kept": kept})
