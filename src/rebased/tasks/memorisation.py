"""Memorisation: one fixed map from keys to values, which only the weights can hold."""

import torch
from pydantic import Field, model_validator
from torch import Generator, Tensor

from rebased.tasks.contract import IGNORE, Examples, Split, Task, register_task
from rebased.tasks.draws import mix_seed


@register_task("memorisation")
class Memorisation(Task):
    """A sequence is made of keys, and after each key the model must say its value. The values are never shown and are
    the same in all sequences: they must be learnt by heart (MAD).

    Of N tokens the last asks. Of the others the first half, K = (N - 1) // 2 tokens, are keys, the rest values. A
    permutation of values, a function of map_seed alone, gives each key its own value. Keys are uniform and independent.
    A split of few sequences may lack keys: what it lacks cannot be learnt. With N = 8 and the map 0 4, 1 6, 2 3:

        inputs  1 7 0 7 1 7
        labels  . 6 . 4 . 6
    """

    sizes = {
        "quick": {"seq_len": 16, "vocab_size": 4096, "train": 8_000, "test": 500},
        "paper": {"seq_len": 32, "vocab_size": 256, "train": 256, "test": 1_280},  # MAD's base settings
    }

    seq_len: int = Field(32, ge=2, description="tokens T per sequence, an even number")
    vocab_size: int = Field(256, ge=4, description="tokens N: the one that asks, keys and values")
    map_seed: int = Field(12345, ge=0, description="of the map from keys to values, which all splits share")

    @model_validator(mode="after")
    def _check(self) -> "Memorisation":
        if self.seq_len % 2:
            raise ValueError(f"seq_len must be even, got {self.seq_len}: use {self.seq_len - 1} or {self.seq_len + 1}")
        return self

    @property
    def n_keys(self) -> int:
        """The number of tokens that are keys, 0 .. n_keys - 1."""
        return (self.vocab_size - 1) // 2

    def count(self) -> int:
        return self.n_keys ** (self.seq_len // 2)

    def chance(self) -> float:
        return 1 / (self.vocab_size - 1 - self.n_keys)

    def value_of(self) -> Tensor:
        """The value of each key: [K] int64 on the CPU."""
        generator = Generator().manual_seed(mix_seed(self.map_seed, 2))
        return self.n_keys + torch.randperm(self.vocab_size - 1 - self.n_keys, generator=generator)[: self.n_keys]

    def draw(self, rows: int, generator: Generator, split: Split) -> Examples:
        device = generator.device
        keys = torch.randint(self.n_keys, (rows, self.seq_len // 2), generator=generator, device=device)
        inputs = torch.stack([keys, torch.full_like(keys, self.vocab_size - 1)], dim=2).flatten(1)
        labels = torch.full_like(inputs, IGNORE)
        labels[:, 1::2] = self.value_of().to(device)[keys]
        return Examples(inputs, labels)
