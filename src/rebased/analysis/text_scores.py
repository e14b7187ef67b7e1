"""Perplexity: log-losses added up in fp64, for recall targets by distance, and for all other tokens."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

EDGES = 2 ** torch.arange(40)
"""Distances from 2^i up to, not including, 2^(i+1) are one class."""


class TextScores(NamedTuple):
    """Log-losses of tokens, added up window by window: windows are what an interval draws from, and processes share.

    Column 0 is for tokens that are no recall targets; column c > 0 for those whose n-gram was last seen 2^(c-1) to
    2^c - 1 tokens ago. Every perplexity is a quotient of these sums, so f ln ppl_AR + (1 - f) ln ppl_nonAR = ln ppl_all
    with f the share of AR tokens.
    """

    nats: Tensor  # [W,C] fp64 on the CPU
    counts: Tensor  # [W,C] int64 on the CPU

    @classmethod
    def of(cls, losses: Tensor, distances: Tensor, asked: Tensor) -> "TextScores":
        """Of one batch: losses, distances (0: no target) and asked (bool), all [B,T]."""
        columns = torch.bucketize(distances.contiguous(), EDGES.to(distances.device), right=True)  # [B,T]
        columns = torch.where(asked, columns, -1)
        classes = range(max(int(columns.max()) + 1, 1))
        losses = losses.double()
        # A sum for each class, not a scatter: that would add in another order each time on a GPU.
        nats = [torch.where(columns == c, losses, 0).sum(1) for c in classes]
        counts = [(columns == c).sum(1) for c in classes]
        return cls(torch.stack(nats, 1).cpu(), torch.stack(counts, 1).cpu())

    @classmethod
    def join(cls, parts: Sequence["TextScores"]) -> "TextScores":
        """The windows of all parts, in their order."""
        if not parts:
            raise ValueError("there are no scores to join: no window was scored")
        width = max(part.nats.shape[1] for part in parts)
        return cls(*(torch.cat([_widen(table, width) for table in tables]) for tables in zip(*parts, strict=True)))

    def mean(self, columns: slice = slice(None)) -> float:
        """Nats a token; nan where there is no token."""
        tokens = self.tokens(columns)
        return float(self.nats.sum(0)[columns].sum()) / tokens if tokens else math.nan

    def tokens(self, columns: slice = slice(None)) -> int:
        return int(self.counts.sum(0)[columns].sum())

    @property
    def ar_share(self) -> float:
        return self.tokens(AR) / self.tokens() if self.tokens() else math.nan


ALL, NON_AR, AR = slice(None), slice(0, 1), slice(1, None)
"""The columns of `TextScores` that each of the paper's three perplexities is made of."""


def perplexity(nats: float) -> float:
    """exp, with inf instead of an error where it is too large to be written down."""
    return math.exp(nats) if not nats > 709 else math.inf


def _widen(table: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(table, (0, width - table.shape[1]))
