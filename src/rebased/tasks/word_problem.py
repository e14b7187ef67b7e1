"""Word problems of groups: multiply what was read so far. Parity is the smallest; A5 is the hardest of its size."""

from functools import cache
from itertools import permutations, product
from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Generator, Tensor

from rebased.tasks.contract import Examples, Split, Task, register_task

Group = Literal["parity", "z60", "a4xz5", "a5"]
ORDER = {"parity": 2, "z60": 60, "a4xz5": 60, "a5": 60}
"""The number of elements. Parity and Z60 commute; A4 x Z5 does not, but is solvable; A5 is not solvable."""


@cache
def multiplication_table(group: Group) -> Tensor:
    """The product of elements i and j, i first: [n,n] int64. Elements are permutations in sorted order; 0 is 1."""
    rotations = [tuple((i + r) % 5 for i in range(5)) for r in range(5)]
    elements = {
        "parity": lambda: permutations(range(2)),
        "z60": lambda: (tuple((i + r) % 60 for i in range(60)) for r in range(60)),
        "a4xz5": lambda: (p + tuple(4 + i for i in r) for p, r in product(_even(4), rotations)),
        "a5": lambda: _even(5),
    }[group]()
    ordered = sorted(elements)
    numbers = {element: i for i, element in enumerate(ordered)}
    return torch.tensor([[numbers[tuple(q[i] for i in p)] for q in ordered] for p in ordered])


def _even(n: int) -> list[tuple[int, ...]]:
    """The even permutations of n points."""
    swapped = [(p, sum(p[i] > p[j] for j in range(n) for i in range(j))) for p in permutations(range(n))]
    return [p for p, inversions in swapped if inversions % 2 == 0]


@register_task("word_problem")
class WordProblem(Task):
    """A sequence is made of random elements of a group. After each of them the model must say the product of all so
    far: it must track a state, however long the sequence is.

    Tokens are elements, uniform and independent; the label of a token is x1 x2 ... xt, from left to right. Group
    "parity" has two elements: the label says whether the number of ones is odd. The groups of 60 elements are Z60,
    A4 x Z5 and A5 (arXiv 2404.08819). The slice "last" is the last position. With parity and T = 6:

        inputs  1 0 1 1 0 0
        labels  1 1 0 1 1 1
    """

    sizes = {
        "quick": {"group": "parity", "seq_len": 32, "vocab_size": 2, "train": 8_000, "test": 500},
        "paper": {"group": "a5", "seq_len": 16, "vocab_size": 60, "train": 100_000, "test": 3_000},
    }

    seq_len: int = Field(32, ge=1, description="elements T per sequence")
    vocab_size: int = Field(60, ge=2, description="tokens, at least as many as the group has elements")
    group: Group = Field("a5", description="whose elements are multiplied; parity has two elements, the others 60")

    @model_validator(mode="after")
    def _check(self) -> "WordProblem":
        if self.vocab_size < ORDER[self.group]:
            raise ValueError(
                f"group {self.group!r} has {ORDER[self.group]} elements, more than vocab_size {self.vocab_size}; "
                f"use vocab_size >= {ORDER[self.group]}"
            )
        return self

    def count(self) -> int:
        return ORDER[self.group] ** self.seq_len

    def chance(self) -> float:
        return 1 / ORDER[self.group]

    def draw(self, rows: int, generator: Generator, split: Split) -> Examples:
        shape, device = (rows, self.seq_len), generator.device
        inputs = torch.randint(ORDER[self.group], shape, generator=generator, device=device)
        table = multiplication_table(self.group).to(device)
        labels = inputs.clone()
        for t in range(1, self.seq_len):
            labels[:, t] = table[labels[:, t - 1], inputs[:, t]]
        last = torch.arange(self.seq_len, device=device).expand(shape) == self.seq_len - 1
        return Examples(inputs, labels, {"last": last})
