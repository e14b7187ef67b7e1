"""Overwriting: keys are written one to four times, in random order, and the last value of each is asked for."""

import torch
from pydantic import Field
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

    sizes = {
        "quick": {"seq_len": 20, "kv_pairs": 3, "updates": 3, "vocab_size": 32, "train": 8_000, "test": 500},
        "paper": {"seq_len": 256, "kv_pairs": 32, "updates": 32, "vocab_size": 8192, "train": 100_000, "test": 3_000},
    }

    kv_pairs: int = Field(16, description="keys n")
    updates: int = Field(16, description="further writes, at most three of one key")

    def _check_updates(self) -> None:
        most = MOST_UPDATES * self.kv_pairs
        if not 0 <= self.updates <= most:
            raise ValueError(f"updates must lie between 0 and {MOST_UPDATES} kv_pairs = {most}; got {self.updates}")

    def count(self) -> None:
        """None: nobody has counted the orders of writes."""

    def draw(self, rows: int, generator: Generator, split: Split) -> Examples:
        n, u = self.kv_pairs, self.updates
        writes = n + u
        keys = 1 + draw_distinct(rows, n, self.first_value - 1, generator)  # [rows,n]
        values = self.first_value + draw_distinct(rows, writes, self.vocab_size - self.first_value, generator)
        each, place = (torch.arange(size, device=keys.device).expand(rows, size) for size in (n, writes))
        again = draw_distinct(rows, u, MOST_UPDATES * n, generator) // MOST_UPDATES  # each key has three lots
        order = draw_distinct(rows, writes, writes, generator)
        which = torch.cat([each, again], dim=1).gather(1, order)  # [rows,writes]: the key of each write
        times = torch.zeros_like(keys).scatter_add_(1, which, torch.ones_like(which))
        last = torch.zeros_like(keys).scatter_reduce_(1, which, place, "amax", include_self=False)
        pairs, answers = torch.stack([keys.gather(1, which), values], dim=2), values.gather(1, last)
        inputs, labels, queries = self._ask(pairs, keys.unsqueeze(2), answers, generator)
        nowhere = torch.zeros_like(inputs, dtype=torch.bool)
        slices = {"updated": nowhere.scatter(1, queries, times > 1), "kept": nowhere.scatter(1, queries, times == 1)}
        return Examples(inputs, labels, slices)
