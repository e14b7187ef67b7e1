"""n-gram copying: find an n-gram in a string, then say what follows it there."""

import torch
from pydantic import Field, model_validator
from torch import Generator

from rebased.tasks.contract import Examples, Split, register_task
from rebased.tasks.copying import Copying


@register_task("ngram_copying")
class NgramCopying(Copying):
    """A sequence is a string of random letters, a separator, and a few neighbouring letters of the string again. After
    these the model must say how the string goes on, letter by letter: it must find them before it can copy.

    Strings and tokens are those of copying. The n letters begin at a place that is uniform among those that a letter
    follows. If they stand in the string several times, the first place counts, and all that follows it is asked for
    (arXiv 2402.01032, "suffix"). With n = 2, T = 12 and L = 4:

        inputs  1 7 4 9 5 2 4 9 0 0 0 0
        labels  . . . . . . . 5 3 . . .

    (3, the label of the end, in training alone).
    """

    sizes = {
        "quick": {"seq_len": 14, "min_length": 3, "max_length": 6, "vocab_size": 12, "train": 8_000, "test": 500},
        "paper": {
            "seq_len": 102,
            "min_length": 10,
            "max_length": 50,
            "vocab_size": 30,
            "train": 100_000,
            "test": 3_000,
        },
    }

    ngram: int = Field(2, ge=1, description="letters n that are shown again, fewer than min_length")

    @model_validator(mode="after")
    def _check_ngram(self) -> "NgramCopying":
        if self.min_length <= self.ngram:
            raise ValueError(f"ngram={self.ngram} leaves nothing to ask; use min_length >= {self.ngram + 1}")
        return self

    def count(self) -> None:
        """None: strings alone have Copying's count, and one string may be asked for from several places."""

    def draw(self, rows: int, generator: Generator, split: Split) -> Examples:
        n = self.ngram
        letters, lengths = self._draw_strings(rows, generator)
        uniform = torch.rand(rows, 1, generator=generator, device=generator.device, dtype=torch.float64)
        place = (uniform * (lengths - n)).long()  # below L - n: a letter follows
        windows = letters.unfold(1, n, 1)  # [rows,max_length-n+1,n]
        chosen = windows.gather(1, place.unsqueeze(2).expand(-1, -1, n))
        first = (windows == chosen).all(2).int().argmax(1, keepdim=True)
        return self._repeat(letters, lengths, first, n, split)
