"""Sums of token losses in fp64: of AR tokens by distance, and of all other tokens. Perplexities follow from them."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

EDGES = 2 ** torch.arange(40)
"""Distances from 2^i to 2^(i+1) - 1 are one class."""


class TextScores(NamedTuple):
    """Token losses, summed per window. Windows are the unit that bootstrap intervals draw and that processes share.

    Column 0 is for tokens that are not AR (not targets of associative recall). Column c > 0 is for AR tokens whose
    n-gram was last seen 2^(c-1) to 2^c - 1 tokens ago. Every perplexity is exp of a ratio of these sums, so
    f ln ppl_AR + (1 - f) ln ppl_nonAR = ln ppl_all, with f the share of AR tokens.
    """

    nats: Tensor  # [W,C] fp64 on the CPU: sums of -ln p
    counts: Tensor  # [W,C] int64 on the CPU: how many tokens

    @classmethod
    def of(cls, losses: Tensor, distances: Tensor, asked: Tensor) -> "TextScores":
        """The sums of one batch of B windows.

        losses [B,T]: -ln p of each label. distances [B,T] int: tokens since the label's n-gram was last seen, 0 if it
        is not AR. asked [B,T] bool: False where there is no label.
        """
        columns = torch.bucketize(distances.contiguous(), EDGES.to(distances.device), right=True)  # [B,T]
        columns = torch.where(asked, columns, -1)
        classes = range(max(int(columns.max()) + 1, 1))
        losses = losses.double()
        # One sum per class instead of a scatter, which on a GPU adds in a different order each time.
        nats = [torch.where(columns == c, losses, 0).sum(1) for c in classes]
        counts = [(columns == c).sum(1) for c in classes]
        return cls(torch.stack(nats, 1).cpu(), torch.stack(counts, 1).cpu())

    @classmethod
    def join(cls, scores: Sequence["TextScores"]) -> "TextScores":
        """The windows of all `scores`, in their order."""
        if not scores:
            raise ValueError("there are no scores to join: no window was scored")
        width = max(some.nats.shape[1] for some in scores)
        widened = ([pad(each, (0, width - each.shape[1])) for each in tables] for tables in zip(*scores, strict=True))
        return cls(*map(torch.cat, widened))

    def mean(self, columns: slice = slice(None)) -> float:
        """Mean loss per token over these columns, in nats; nan if they have no token."""
        tokens = self.tokens(columns)
        return float(self.nats.sum(0)[columns].sum()) / tokens if tokens else math.nan

    def tokens(self, columns: slice = slice(None)) -> int:
        """How many tokens these columns have."""
        return int(self.counts.sum(0)[columns].sum())

    @property
    def ar_share(self) -> float:
        """AR tokens / all tokens; nan if there is no token."""
        return self.tokens(AR) / self.tokens() if self.tokens() else math.nan


ALL, NON_AR, AR = slice(None), slice(0, 1), slice(1, None)
"""The columns of `TextScores` for each of the paper's three perplexities."""


def distances_of(column: int) -> tuple[int, int]:
    """(nearest, farthest) distance of the AR tokens in a column: (1, 1) in column 1, (2, 3) in 2, (4, 7) in 3, ..."""
    return 2 ** (column - 1), 2**column - 1


def perplexity(nats: float) -> float:
    """exp(nats), or inf where that overflows."""
    return math.exp(nats) if not nats > 709 else math.inf
