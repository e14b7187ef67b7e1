"""Multi-query associative recall: read pairs of keys and values, then say the value of each key that is asked for."""

import math
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Generator, Tensor
from torch.nn.functional import pad

from rebased.tasks.contract import BLOCK_ROWS, IGNORE, Examples, Split, Task, register_task
from rebased.tasks.draws import draw_distinct, draw_slots, mix_seed

FILLER = 0

Alpha = Annotated[float, Field(gt=0, allow_inf_nan=False)]  # 0.01 in the paper; at 1 every slot is as likely


@register_task("mqar")
class MQAR(Task):
    """A sequence begins with pairs of a key and a value. Later its keys come again, in places that vary, and the model
    must say each one's value. Pairs are drawn anew for every sequence, so nothing is learnt by heart: the answer must
    be looked up in what was read (multi-query associative recall, MQAR).

    One example of T tokens: k1 v1 k2 v2 ... kn vn, then a query area of S = (T - 2n) / 2 slots of two positions each.
    A slot that is drawn holds a key, and the label *at that same position* is the key's value. All else is filler.
    Slots are drawn without replacement, slot g with weight (g + 1) ** (alpha - 1). With T = 12, n = 2 and 16 tokens:

        inputs  3 9 5 12 3 0 0 0 5  0 0 0
        labels  . . .  . 9 . . . 12 . . .
    """

    segment_fields: ClassVar[tuple[str, ...]] = ("seq_len", "kv_pairs")
    segment_words = {"seq_len": "T = {}", "kv_pairs": "{} pairs"}

    sizes = {
        "quick": {"seq_len": 24, "kv_pairs": 6, "vocab_size": 48, "train": 8_000, "test": 500},
        "paper": {"seq_len": 256, "kv_pairs": 64, "vocab_size": 8192, "train": 100_000, "test": 3_000},
    }

    seq_len: int = Field(256, description="tokens T per sequence, an even number")
    kv_pairs: int = Field(64, description="pairs n of a key and a value, at most seq_len / 4")
    vocab_size: int = 8192  # keys are 1 .. N/2 - 1, values N/2 .. N - 1
    alpha: Alpha = Field(0.01, description="where keys are asked for: slot g has weight (g + 1)^(alpha - 1)")
    random_non_queries: Literal[False, True, "no_keys"] = Field(
        False, description="fillers become uniform random tokens; no_keys: all but the keys that the row asks for"
    )

    @model_validator(mode="after")
    def _check(self) -> "MQAR":
        self._check_sizes()
        return self

    def _check_sizes(self) -> None:
        if self.seq_len % 2:
            raise ValueError(f"seq_len must be even, got {self.seq_len}: use {self.seq_len - 1} or {self.seq_len + 1}")
        if self.kv_pairs < 1:
            raise ValueError(f"kv_pairs must be at least 1, got {self.kv_pairs}")
        if 4 * self.kv_pairs > self.seq_len:
            raise ValueError(
                f"kv_pairs={self.kv_pairs} needs {4 * self.kv_pairs} tokens (4 per pair), but seq_len is "
                f"{self.seq_len}: use seq_len >= {4 * self.kv_pairs} or kv_pairs <= {self.seq_len // 4}"
            )
        if self.vocab_size <= self.seq_len:  # with 4n <= T this also leaves at least 2n - 1 keys and 2n values
            raise ValueError(
                f"vocab_size must exceed seq_len={self.seq_len}, got {self.vocab_size}: use at least {self.seq_len + 1}"
            )

    @property
    def first_value(self) -> int:
        """The smallest token that is a value; keys are 1 .. first_value - 1."""
        return self.vocab_size // 2

    @property
    def n_slots(self) -> int:
        """The number of positions at which a key can be asked for."""
        return (self.seq_len - 2 * self.kv_pairs) // 2

    def count(self) -> int | None:
        """How many different examples there are, fillers apart."""
        n, n_keys = self.kv_pairs, self.first_value - 1
        return math.perm(n_keys, n) * math.perm(self.vocab_size - 1 - n_keys, n) * math.perm(self.n_slots, n)

    def chance(self) -> float:
        return 1 / (self.vocab_size - self.first_value)

    @property
    def context_length(self) -> int:
        """Positions of the pairs, which come first: 2 kv_pairs, and in forgetting MQAR those of the updates."""
        return self.seq_len - 2 * self.n_slots

    def answer_positions(self, examples: Examples) -> Tensor:
        """The position of the value that each question asks for: [N,T] int64, -1 where nothing is asked."""
        inputs, labels, _ = examples
        positions = torch.full_like(labels, -1)
        context = inputs[:, : self.context_length]  # of all its tokens just one is the value
        rows, columns = (labels != IGNORE).nonzero(as_tuple=True)
        positions[rows, columns] = (context[rows] == labels[rows, columns].unsqueeze(1)).int().argmax(1)
        return positions

    def build(self, n: int, seed: int, device: torch.device | str = "cpu", split: Split = "train") -> Examples:
        """n examples, as Task.build makes them, with their fillers.

        Fillers have a generator of their own, so a seed asks the same questions with and without random fillers.
        """
        examples = super().build(n, seed, device, split)
        if not self.random_non_queries:
            return examples
        filling, filling_again = (Generator(device).manual_seed(mix_seed(seed, stream)) for stream in (1, 2))

        def fill(generator: Generator) -> Tensor:
            return torch.randint(self.vocab_size, (BLOCK_ROWS, self.seq_len), generator=generator, device=device)

        for x, labels in zip(examples.inputs.split(BLOCK_ROWS), examples.labels.split(BLOCK_ROWS), strict=True):
            noise = fill(filling)
            if self.random_non_queries == "no_keys":
                is_key = labels.new_zeros(BLOCK_ROWS, self.vocab_size).bool()
                is_key[: len(x)].scatter_(1, x[labels != IGNORE].view(len(x), -1), True)
                while (clash := is_key.gather(1, noise)).any():
                    noise = torch.where(clash, fill(filling_again), noise)
            x.copy_(torch.where(x == FILLER, noise[: len(x)], x))
        return examples

    def draw(self, rows: int, generator: Generator, split: Split) -> Examples:
        n = self.kv_pairs
        keys = 1 + draw_distinct(rows, n, self.first_value - 1, generator)  # [rows,n]
        values = self.first_value + draw_distinct(rows, n, self.vocab_size - self.first_value, generator)
        inputs, labels, _ = self._ask(torch.stack([keys, values], dim=2), keys.unsqueeze(2), values, generator)
        return Examples(inputs, labels)

    def _ask(
        self, writes: Tensor, keys: Tensor, answers: Tensor, generator: Generator
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs and labels [rows,T] of writes [rows,w,s], of which the last token is the value; then the keys
        [rows,n,s-1] in slots that are drawn here. Also the positions [rows,n] of the labels, which are the answers."""
        w, s = writes.shape[1:]
        slots = s * (w + draw_slots(len(keys), keys.shape[1], self.n_slots, self.alpha, generator))
        inputs = pad(writes.flatten(1), (0, self.seq_len - s * w), value=FILLER)
        for i, tokens in enumerate(keys.unbind(2)):
            inputs.scatter_(1, slots + i, tokens)
        asked = slots + s - 2
        return inputs, torch.full_like(inputs, IGNORE).scatter_(1, asked, answers), asked
