"""Needle in noise: one sentence with a number among noise, or among many sentences like it."""

import math
from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Generator

from rebased.tasks.contract import IGNORE, Examples, Split, Task, register_task
from rebased.tasks.draws import draw_distinct

DIGITS = 10  # tokens 0 .. 9
FOR, IS, STOP = 10, 11, 12
FIRST_WORD = 13


@register_task("needle")
class Needle(Task):
    """A sentence says the number that belongs to a key of two words. It stands somewhere in one line of words, repeated
    over and over, or among such sentences with other keys. At the end the key is asked for, and the model must say the
    digits of its number (RULER's S-NIAH 1 and multi-key NIAH 2, as tokens instead of text).

    A needle is FOR w1 w2 IS d1 ... dn STOP, with w1 and w2 from the two halves of the key words and n uniform digits.
    Haystack "noise": the words of one line, 13 .. 12 + line, repeat; a needle stands before a repetition of the line
    that is uniform among those before the question. Haystack "needles": as many needles as fit, no two with one key;
    words of the line fill up what is left before them, and a uniform one is asked for. The question is FOR w1 w2 IS,
    labelled with d1, and the digits but the last, labelled with the next. With n = 2, line = 3, N = 20 and T = 15:

        inputs  13 14 15 10 17 18 11 4 2 12 10 17 18 11 4
        labels   .  .  .  .  .  .  . . .  .  .  .  .  4 2
    """

    sizes = {
        "quick": {"seq_len": 20, "vocab_size": 25, "digits": 2, "line": 4, "train": 8_000, "test": 500},
        "paper": {"seq_len": 512, "vocab_size": 128, "digits": 7, "line": 25, "train": 20_000, "test": 2_000},
    }

    seq_len: int = Field(512, description="tokens T per sequence, at least 2 * digits + 8")
    vocab_size: int = Field(128, description="13 signs, the words of the line, and at least 4 key words")
    haystack: Literal["noise", "needles"] = Field("noise", description="what stands around the needle")
    digits: int = Field(7, ge=1, description="digits n of a number")
    line: int = Field(25, ge=1, description="words of the line that repeats")

    @model_validator(mode="after")
    def _check(self) -> "Needle":
        if self.context_length < self.digits + 5:
            raise ValueError(f"digits={self.digits} needs seq_len >= {2 * self.digits + 8}, got {self.seq_len}")
        needed = FIRST_WORD + self.line + 4
        if self.vocab_size < needed:
            raise ValueError(f"line={self.line} needs vocab_size >= {needed}, got {self.vocab_size}")
        if math.prod(self.key_words) < self.n_needles:
            raise ValueError(f"{self.n_needles} needles need as many keys; vocab_size {self.vocab_size} has too few")
        return self

    @property
    def context_length(self) -> int:
        return self.seq_len - self.digits - 3

    @property
    def key_words(self) -> tuple[int, int]:
        """The numbers of first and of second words of keys; these tokens follow the words of the line."""
        words = self.vocab_size - FIRST_WORD - self.line
        return words // 2, words - words // 2

    @property
    def n_needles(self) -> int:
        """How many needles stand in the haystack."""
        return 1 if self.haystack == "noise" else self.context_length // (self.digits + 5)

    def chance(self) -> float:
        return 1 / DIGITS

    def draw(self, rows: int, generator: Generator, split: Split) -> Examples:
        n, size = self.n_needles, self.digits + 5
        use: Any = {"generator": generator, "device": generator.device}
        needles = torch.full((rows, n, size), FOR, device=generator.device)
        keys, second = draw_distinct(rows, n, math.prod(self.key_words), generator), self.key_words[1]
        needles[:, :, 1] = FIRST_WORD + self.line + keys // second
        needles[:, :, 2] = self.vocab_size - second + keys % second
        needles[:, :, 3], needles[:, :, -1] = IS, STOP
        needles[:, :, 4:-1] = torch.randint(DIGITS, (rows, n, self.digits), **use)
        asked = needles[torch.arange(rows, device=generator.device), torch.randint(n, (rows,), **use)]  # [rows,n+5]
        left = self.context_length - n * size  # words of the line
        begin = self.line * torch.randint(left // self.line + 1, (rows, 1), **use)  # [rows,1]
        if self.haystack == "needles":
            begin.fill_(left)
        at = torch.arange(self.context_length, device=generator.device).expand(rows, -1)
        inside = at - begin
        word = FIRST_WORD + torch.where(inside < 0, at, at - n * size) % self.line
        needle = needles.flatten(1).gather(1, inside.clamp(0, n * size - 1))
        context = torch.where((inside >= 0) & (inside < n * size), needle, word)
        inputs = torch.cat([context, asked[:, :-2]], dim=1)
        labels = torch.full_like(inputs, IGNORE)
        labels[:, -self.digits :] = asked[:, 4:-1]
        return Examples(inputs, labels)
