"""Copying: read a string, then say it again, letter by letter."""

from typing import Any

import torch
from pydantic import Field, model_validator
from torch import Generator, Tensor

from rebased.tasks.contract import IGNORE, Examples, Split, Task, register_task

PAD, BEGIN, SEPARATOR, END = range(4)
FIRST_LETTER = 4


@register_task("copying")
class Copying(Task):
    """A sequence is a string of random letters, a separator, and the string again. From the separator on the model must
    say which letter comes next: it must find where it is in the string, however long that is.

    The length L of a row's string is uniform in min_length .. max_length, both included, and its letters are uniform,
    with repetition. The row is BEGIN s1 ... sL SEPARATOR s1 ... sL, then PAD up to T tokens. The label at SEPARATOR is
    s1, that at the second s1 is s2, and so on; in training the label at the second sL is END, in testing it has none,
    so that accuracy is of letters alone. With T = 10 and L = 3 (BEGIN 1, SEPARATOR 2, END 3, PAD 0, letters from 4):

        inputs  1 7 4 9 2 7 4 9 0 0
        labels  . . . . 7 4 9 3 . .
    """

    segment_fields = ("seq_len", "min_length", "max_length")
    segment_words = {
        "seq_len": "T = {}",
        "min_length": "at least {} letters",
        "max_length": "at most {} letters",
    }

    sizes = {
        "quick": {"seq_len": 18, "min_length": 3, "max_length": 8, "vocab_size": 12, "train": 8_000, "test": 500},
        "paper": {"seq_len": 102, "min_length": 5, "max_length": 50, "vocab_size": 30, "train": 100_000, "test": 3_000},
    }

    seq_len: int = Field(42, description="tokens T per sequence, at least 2 * max_length + 2")
    vocab_size: int = Field(30, ge=FIRST_LETTER + 2)  # four signs and at least two letters
    min_length: int = Field(5, ge=1, description="letters of the shortest string")
    max_length: int = Field(20, description="letters of the longest string")

    @model_validator(mode="after")
    def _check(self) -> "Copying":
        if self.max_length < self.min_length:
            raise ValueError(f"max_length={self.max_length} is below min_length={self.min_length}; raise it")
        needed = 2 * self.max_length + 2
        if self.seq_len < needed:
            raise ValueError(
                f"a string of max_length={self.max_length} letters needs {needed} tokens (twice the string, its begin "
                f"and the separator), but seq_len is {self.seq_len}: use seq_len >= {needed} or "
                f"max_length <= {(self.seq_len - 2) // 2}"
            )
        return self

    @property
    def n_letters(self) -> int:
        """The number of different letters."""
        return self.vocab_size - FIRST_LETTER

    def count(self) -> int | None:
        return sum(self.n_letters**length for length in range(self.min_length, self.max_length + 1))

    def chance(self) -> float:
        return 1 / self.n_letters

    def draw(self, rows: int, generator: Generator, split: Split) -> Examples:
        letters, lengths = self._draw_strings(rows, generator)
        return self._repeat(letters, lengths, torch.zeros_like(lengths), 0, split)

    def _draw_strings(self, rows: int, generator: Generator) -> tuple[Tensor, Tensor]:
        """Letters [rows,max_length] and how many of them are the string, [rows,1]."""
        use: Any = {"generator": generator, "device": generator.device}
        lengths = torch.randint(self.min_length, self.max_length + 1, (rows, 1), **use)  # the upper bound is excluded
        return torch.randint(FIRST_LETTER, self.vocab_size, (rows, self.max_length), **use), lengths

    def _repeat(self, letters: Tensor, lengths: Tensor, start: Tensor, shown: int, split: Split) -> Examples:
        """The rows of these strings, repeated from letter `start` [rows,1] on; the first `shown` have no label."""
        at = torch.arange(self.seq_len, device=letters.device).expand(len(letters), -1)  # [rows,T]

        def letter(index: Tensor) -> Tensor:
            return letters.gather(1, index.clamp(0, self.max_length - 1))

        again = at - lengths - 2 + start  # the index in the string of the letter that stands there again
        inputs = torch.where(at <= lengths, letter(at - 1), letter(again))
        inputs = torch.where(at == 0, BEGIN, torch.where(at == lengths + 1, SEPARATOR, inputs))
        inputs = torch.where(again < lengths, inputs, PAD)
        labels = torch.where((again >= start + shown - 1) & (again < lengths - 1), letter(again + 1), IGNORE)
        if split == "train":
            labels = torch.where(again == lengths - 1, END, labels)
        return Examples(inputs, labels)
