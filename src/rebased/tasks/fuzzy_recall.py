"""Fuzzy recall: keys and values are motifs of several tokens, and nothing marks where one ends."""

import torch
from pydantic import Field, model_validator
from torch import Generator, Tensor

from rebased.tasks.contract import IGNORE, Examples, Split, Task, register_task
from rebased.tasks.draws import draw_distinct, first_equal


@register_task("fuzzy_recall")
class FuzzyRecall(Task):
    """A sequence is made of pairs of a key and its value, both motifs of one or more tokens. When a key comes again,
    the model must say the tokens of its value: it must join tokens to keys before it can compare them (MAD).

    Of N tokens the last is padding. Of the others the first half are tokens of keys, the rest of values. A motif has 1
    to m = `motif` different tokens, its length and then its tokens uniform; keys that are tested have m. Each key has
    one value per sequence. One pair, the probe, of s tokens in all, is shown at the first boundary at or after a token
    that is uniform in 0 .. T - 2s - 1, unless its key was drawn before. Pairs are added while there are fewer than
    T - s - 2m tokens, then the probe once more. Padding on the left fills up T + 1 tokens, of which the last is asked
    for and not shown. In training every next token is a label, in testing those of values whose key came before. With
    N = 10 (keys 0 to 3, values 4 to 8), m = 2 and T = 12:

        inputs  9 9 9 0 3 6 2 1 5 4 0 3
        test    . . . . . . . . . . . 6
    """

    sizes = {
        "quick": {"seq_len": 23, "vocab_size": 8, "motif": 2, "train": 8_000, "test": 500},
        "paper": {"seq_len": 128, "vocab_size": 16, "motif": 3, "train": 12_800, "test": 1_280},  # MAD's base settings
    }

    seq_len: int = Field(128, description="tokens T per sequence, at least 6 * motif + 1")
    vocab_size: int = Field(16, description="padding, and at least `motif` tokens each of keys and of values")
    motif: int = Field(3, ge=1, le=4, description="tokens of the longest key and of the longest value")

    @model_validator(mode="after")
    def _check(self) -> "FuzzyRecall":
        if self.seq_len <= 6 * self.motif:
            raise ValueError(f"motif={self.motif} needs more than {6 * self.motif} tokens; seq_len is {self.seq_len}")
        if self.n_keys < self.motif:
            raise ValueError(f"vocab_size {self.vocab_size} is too small; use at least {2 * self.motif + 1}")
        return self

    @property
    def n_keys(self) -> int:
        """The number of tokens that keys are made of, 0 .. n_keys - 1."""
        return (self.vocab_size - 1) // 2

    def chance(self) -> float:
        return 1 / (self.vocab_size - 1 - self.n_keys)

    def _motifs(self, rows: int, n: int, least: int, size: int, generator: Generator) -> Tensor:
        """[rows,n,m] motifs of `least` to m different numbers below size; -1 after the end of a motif."""
        tokens = draw_distinct(rows * n, self.motif, size, generator).view(rows, n, self.motif)
        length = torch.randint(least, self.motif + 1, (rows, n, 1), generator=generator, device=generator.device)
        return tokens.masked_fill_(torch.arange(self.motif, device=generator.device) >= length, -1)

    def draw(self, rows: int, generator: Generator, split: Split) -> Examples:
        T, m, device = self.seq_len, self.motif, generator.device
        n = (T + 1) // 2  # slots: all that may fit, and the last for the probe
        keys = self._motifs(rows, n, 1 if split == "train" else m, self.n_keys, generator)
        values = self._motifs(rows, n, 1, self.vocab_size - 1 - self.n_keys, generator)
        values = torch.where(values < 0, -1, values + self.n_keys)
        probe = torch.cat([keys, values], dim=2)[:, -1:]
        size = (probe >= 0).sum(2)  # [rows,1]: s
        uniform = torch.rand(rows, 1, generator=generator, device=device, dtype=torch.float64)
        wanted = (uniform * (T - 2 * size)).long()
        slot = torch.arange(n, device=device)
        code = ((keys + 1) * (self.n_keys + 1) ** torch.arange(m, device=device)).sum(2)  # [rows,n]: one per key

        _, begin = _with_values(keys, values, code)
        room = (begin[:, :-1] < T - size - 2 * m).sum(1, keepdim=True)
        place = torch.minimum((begin[:, :-1] < wanted).sum(1, keepdim=True), room - 1)
        early = ((code == code[:, -1:]) & (slot < place)).any(1, keepdim=True)
        put = (slot == place) & ~early
        keys, code = torch.where(put.unsqueeze(2), keys[:, -1:], keys), torch.where(put, code[:, -1:], code)
        pairs, begin = _with_values(keys, values, code)
        shown = (begin < T - size - 2 * m) | (slot == n - 1)
        return self._place(pairs, shown, first_equal(code) < slot, split)

    def _place(self, pairs: Tensor, shown: Tensor, again: Tensor, split: Split) -> Examples:
        """The tokens of all pairs that are shown, one after the other at the end of each row, and their labels."""
        rows, end = len(pairs), self.seq_len + 1
        used = ((pairs >= 0) & shown.unsqueeze(2)).flatten(1)
        column = used.cumsum(1) - 1 + end - used.sum(1, keepdim=True)
        column = torch.where(used, column, end)  # what is not used stands behind the row
        tokens = pairs.new_full((rows, end + 1), self.vocab_size - 1).scatter_(1, column, pairs.flatten(1))[:, :end]
        is_asked = torch.zeros_like(pairs, dtype=torch.bool)
        is_asked[:, :, self.motif :] = again.unsqueeze(2)
        asked = used.new_zeros(rows, end + 1).scatter_(1, column, is_asked.flatten(1))[:, 1:end]
        labels = tokens[:, 1:].contiguous()
        if split != "train":
            labels.masked_fill_(~asked, IGNORE)
        return Examples(tokens[:, :-1].contiguous(), labels)


def _with_values(keys: Tensor, values: Tensor, code: Tensor) -> tuple[Tensor, Tensor]:
    """Pairs [rows,n,2m] of keys and of the values that these had first, the last key that of the last slot; and where
    each pair begins if all are written one after the other, [rows,n]."""
    first = torch.where(code == code[:, -1:], code.shape[1] - 1, first_equal(code))
    pairs = torch.cat([keys, values.gather(1, first.unsqueeze(2).expand_as(values))], dim=2)
    sizes = (pairs >= 0).sum(2)
    return pairs, sizes.cumsum(1) - sizes
