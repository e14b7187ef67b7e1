"""Compression: the last position alone must tell every token that was read."""

import torch
from pydantic import Field
from torch import Generator

from rebased.tasks.contract import Examples, Split, Task, register_task


@register_task("compression")
class Compression(Task):
    """A sequence is made of random tokens and a last one that ends it. From what the model has at this last position
    alone, a small decoder must say every token: all of them must be kept in one vector (MAD).

    T - 1 tokens, uniform in 0 .. N - 2, then N - 1. The label of each position is its token, the last one too. The
    model has `readout: last` (models/readout.py): its logits depend on no position but the last. With N = 8 and T = 5:

        inputs  3 0 6 3 7
        labels  3 0 6 3 7
    """

    readout = "last"
    sizes = {
        "quick": {"seq_len": 7, "vocab_size": 6, "train": 8_000, "test": 500},
        "paper": {"seq_len": 32, "vocab_size": 16, "train": 12_800, "test": 1_280},  # MAD's base settings
    }

    seq_len: int = Field(32, ge=2, description="tokens T per sequence, the one that ends it included")
    vocab_size: int = Field(16, ge=3, description="tokens N: the one that ends a sequence is the last")

    def count(self) -> int:
        return (self.vocab_size - 1) ** (self.seq_len - 1)

    def chance(self) -> float:
        """The accuracy of guessing, all but the last, which is known."""
        return (1 + (self.seq_len - 1) / (self.vocab_size - 1)) / self.seq_len

    def draw(self, rows: int, generator: Generator, split: Split) -> Examples:
        shape = (rows, self.seq_len)
        inputs = torch.randint(self.vocab_size - 1, shape, generator=generator, device=generator.device)
        inputs[:, -1] = self.vocab_size - 1
        return Examples(inputs, inputs.clone())
