"""Forgetting MQAR: some keys get a new value after all pairs were read, and the last value is asked for."""

import math

import torch
from pydantic import Field
from torch import Generator

from rebased.tasks.contract import Examples, Split, register_task
from rebased.tasks.draws import draw_distinct
from rebased.tasks.mqar import MQAR


@register_task("forgetting_mqar")
class ForgettingMQAR(MQAR):
    """A sequence begins with pairs of a key and a value. Then some of its keys come again with a new value. Later every
    key is asked for, in places that vary, and the model must say its last value: it must forget the old ones.

    One example of T tokens: n pairs, then u pairs of u of these keys, drawn at random, with new values, then the query
    area of MQAR with (T - 2n - 2u) / 2 slots. The n + u values are distinct, so a new value is never the old one. The
    slices are "updated", the u keys with a new value, and "kept", the other n - u. With T = 12, n = 2, u = 1 and 16
    tokens:

        inputs  3 9 5 12 5 8 3 0 0 0 5 0
        labels  . . .  . . . 9 . . . 8 .
    """

    segment_fields = ("seq_len", "kv_pairs", "updates")
    segment_words = {**MQAR.segment_words, "updates": "{} updates"}

    sizes = {
        "quick": {"seq_len": 20, "kv_pairs": 3, "updates": 2, "vocab_size": 32, "train": 8_000, "test": 500},
        "paper": {"seq_len": 256, "kv_pairs": 36, "updates": 4, "vocab_size": 8192, "train": 100_000, "test": 3_000},
    }

    kv_pairs: int = Field(16, description="pairs n of a key and a value")
    updates: int = Field(4, description="keys u that get a new value, at most kv_pairs")

    def _check_updates(self) -> None:
        n, u = self.kv_pairs, self.updates
        if not 1 <= u <= n:
            raise ValueError(f"updates must lie between 1 and kv_pairs={n}, because each needs its own key; got {u}")

    def _check_sizes(self) -> None:
        self._check_updates()
        n, u = self.kv_pairs, self.updates
        if 4 * n + 2 * u > self.seq_len:
            raise ValueError(
                f"kv_pairs={n} and updates={u} need {4 * n + 2 * u} tokens (4 per pair, 2 per update), but seq_len is "
                f"{self.seq_len}: use seq_len >= {4 * n + 2 * u}, or fewer pairs or updates"
            )
        super()._check_sizes()

    @property
    def n_slots(self) -> int:
        return (self.seq_len - 2 * self.kv_pairs - 2 * self.updates) // 2

    def count(self) -> int | None:
        n, u, n_keys = self.kv_pairs, self.updates, self.first_value - 1
        values = math.perm(self.vocab_size - self.first_value, n + u)
        return math.perm(n_keys, n) * math.perm(n, u) * values * math.perm(self.n_slots, n)

    def draw(self, rows: int, generator: Generator, split: Split) -> Examples:
        n, u = self.kv_pairs, self.updates
        keys = 1 + draw_distinct(rows, n, self.first_value - 1, generator)  # [rows,n]
        values = self.first_value + draw_distinct(rows, n + u, self.vocab_size - self.first_value, generator)
        old, new = values[:, :n], values[:, n:]
        which = draw_distinct(rows, u, n, generator)  # [rows,u]: the keys that get a new value
        writes = torch.stack([torch.cat([keys, keys.gather(1, which)], dim=1), values], dim=2)
        answers = old.scatter(1, which, new)
        inputs, labels, queries = self._ask(writes, keys.unsqueeze(2), answers, generator)
        nowhere = torch.zeros_like(inputs, dtype=torch.bool)
        updated = nowhere.scatter(1, queries.gather(1, which), True)
        kept = nowhere.scatter(1, queries, True) & ~updated
        return Examples(inputs, labels, {"updated": updated, "kept": kept})
