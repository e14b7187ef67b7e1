"""Noisy recall: pairs of a key and a value among noise; each key that comes again asks for its value."""

from typing import Any

import torch
from pydantic import Field, model_validator
from torch import Generator

from rebased.tasks.contract import IGNORE, Examples, Split, Task, register_task
from rebased.tasks.draws import first_equal


@register_task("noisy_recall")
class NoisyRecall(Task):
    """A sequence is made of pairs of a key and its value, with noise between pairs. Keys come again all the time, and
    from the second time on the model must say the key's value; noise must neither be stored nor asked for (MAD).

    Of N tokens the last M = noise_tokens are noise. Of the others the first half are keys, the rest values. There are
    P = (T + 1) / 2 slots of two tokens. A slot before the last is noise with probability `noise`, two independent
    uniform tokens; but one slot, chosen uniformly, never is. Other slots hold a uniform key and its value, drawn
    uniformly once per sequence and key; keys may share a value. The last slot repeats a key, uniform among those shown.
    The last value is asked for and not shown. In training every next token is a label, in testing only the value of a
    key that came before. With N = 10, M = 4, T = 9:

        inputs    1 5 8 6 1 5 0 3 1
        test      . . . . 5 . . . 5
        training  5 8 6 1 5 0 3 1 5
    """

    sizes = {
        "quick": {"seq_len": 31, "vocab_size": 24, "noise_tokens": 8, "train": 8_000, "test": 500},
        "paper": {"seq_len": 127, "vocab_size": 32, "train": 12_800, "test": 1_280},  # MAD's base settings
    }

    seq_len: int = Field(127, ge=3, description="tokens T per sequence, an odd number: the last value is not shown")
    vocab_size: int = Field(32, description="noise_tokens, and at least one key and two values")
    noise_tokens: int = Field(16, ge=1, description="tokens M that are noise, the last ones")
    noise: float = Field(0.2, ge=0, lt=1, description="share of slots that are noise")

    @model_validator(mode="after")
    def _check(self) -> "NoisyRecall":
        if self.seq_len % 2 == 0:
            raise ValueError(f"seq_len must be odd, got {self.seq_len}: use {self.seq_len - 1} or {self.seq_len + 1}")
        if self.vocab_size < self.noise_tokens + 3:
            raise ValueError(
                f"vocab_size {self.vocab_size} leaves too few keys and values beside noise_tokens={self.noise_tokens}; "
                f"use vocab_size >= {self.noise_tokens + 3}"
            )
        return self

    @property
    def n_keys(self) -> int:
        """The number of tokens that are keys, 0 .. n_keys - 1."""
        return (self.vocab_size - self.noise_tokens) // 2

    def chance(self) -> float:
        return 1 / (self.vocab_size - self.noise_tokens - self.n_keys)

    def draw(self, rows: int, generator: Generator, split: Split) -> Examples:
        slots, n_keys, first_noise = (self.seq_len + 1) // 2, self.n_keys, self.vocab_size - self.noise_tokens
        use: Any = {"generator": generator, "device": generator.device}
        keys = torch.randint(n_keys, (rows, slots), **use)
        value_of = torch.randint(n_keys, first_noise, (rows, n_keys), **use)
        is_noise = torch.rand(rows, slots, **use) < self.noise
        is_noise.scatter_(1, torch.randint(slots - 1, (rows, 1), **use), False)
        is_noise[:, -1] = False
        slot = torch.arange(slots, device=generator.device)
        again = first_equal(torch.where(is_noise, n_keys + slot, keys)) < slot  # [rows,P]: the key came before
        again[:, -1] = True
        known = torch.rand(rows, slots, **use).masked_fill_(is_noise | again, -1.0).argmax(1, keepdim=True)
        keys[:, -1:] = keys.gather(1, known)
        values = value_of.gather(1, keys)
        pairs = torch.stack([keys, values], dim=2)  # [rows,P,2]
        noise = torch.randint(first_noise, self.vocab_size, pairs.shape, **use)
        tokens = torch.where(is_noise.unsqueeze(2), noise, pairs).flatten(1)
        inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        if split != "train":
            labels[:, ::2].masked_fill_(~again | is_noise, IGNORE)
            labels[:, 1::2] = IGNORE
        return Examples(inputs, labels)
