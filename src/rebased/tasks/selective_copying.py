"""Selective copying: read tokens among blanks, then say the tokens alone, in their order."""

import math

import torch
from pydantic import Field, model_validator
from torch import Generator

from rebased.tasks.contract import IGNORE, Examples, Split, Task, register_task


@register_task("selective_copying")
class SelectiveCopying(Task):
    """A sequence holds a few tokens among many blanks, then a sign to copy. After it the model must say the tokens in
    their order: it must keep what matters and ignore the blanks, which stand in places that vary (MAD).

    With N = vocab_size, n = n_tokens and T = seq_len: n tokens, uniform in 0 .. N - 3 with repetition, stand in order
    among T - 2n - 1 blanks (N - 2). Each blank goes before one of the n tokens, chosen uniformly and by itself, so the
    numbers of blanks before the tokens are multinomial, and the last token stands right before the copy sign (N - 1).
    Then come n blanks, labelled with the n tokens. With N = 8, n = 3 and T = 12:

        inputs  6 2 6 6 0 6 6 4 7 6 6 6
        labels  . . . . . . . . . 2 0 4

    (here T - 2n - 1 = 5 blanks stand before the sign).
    """

    segment_fields = ("seq_len", "n_tokens")
    segment_words = {"seq_len": "T = {}", "n_tokens": "{} tokens to copy"}

    sizes = {
        "quick": {"seq_len": 20, "n_tokens": 3, "vocab_size": 8, "train": 8_000, "test": 500},
        "paper": {"seq_len": 256, "n_tokens": 16, "vocab_size": 16, "train": 12_800, "test": 1_280},
    }

    seq_len: int = Field(256, description="tokens T per sequence, at least 2 * n_tokens + 1")
    vocab_size: int = Field(16, ge=4)  # two signs and at least two tokens
    n_tokens: int = Field(16, ge=1, description="tokens n to copy")

    @model_validator(mode="after")
    def _check(self) -> "SelectiveCopying":
        needed = 2 * self.n_tokens + 1
        if self.seq_len < needed:
            raise ValueError(
                f"n_tokens={self.n_tokens} needs {needed} tokens (each twice, and the copy sign), but seq_len is "
                f"{self.seq_len}: use seq_len >= {needed} or n_tokens <= {(self.seq_len - 1) // 2}"
            )
        return self

    @property
    def n_blanks(self) -> int:
        """The number of blanks before the copy sign."""
        return self.seq_len - 2 * self.n_tokens - 1

    def count(self) -> int:
        return (self.vocab_size - 2) ** self.n_tokens * math.comb(self.n_blanks + self.n_tokens - 1, self.n_blanks)

    def chance(self) -> float:
        return 1 / (self.vocab_size - 2)

    def draw(self, rows: int, generator: Generator, split: Split) -> Examples:
        n, device = self.n_tokens, generator.device
        tokens = torch.randint(self.vocab_size - 2, (rows, n), generator=generator, device=device)
        before = torch.randint(n, (rows, self.n_blanks), generator=generator, device=device)  # which token it precedes
        blanks = tokens.new_zeros(rows, n).scatter_add_(1, before, torch.ones_like(before))
        places = blanks.cumsum(1) + torch.arange(n, device=device)  # [rows,n]
        inputs = tokens.new_full((rows, self.seq_len), self.vocab_size - 2)
        inputs.scatter_(1, places, tokens)
        inputs[:, -n - 1] = self.vocab_size - 1
        labels = torch.full_like(inputs, IGNORE)
        labels[:, -n:] = tokens
        return Examples(inputs, labels)
