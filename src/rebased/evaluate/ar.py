"""Associative recall in text: which tokens could be said by looking up what followed the same words before."""

from typing import NamedTuple

import torch
from torch import Tensor

from rebased.evaluate.ngrams import NgramCounts, ngram_keys


class ARRule(NamedTuple):
    """What counts as associative recall. The token at t does iff the n-gram that ends at t occurred earlier in its row:
    in "a b a b" the last b alone, in "a a a" the last a alone."""

    order: int = 2
    reset_token: int | None = None
    """The token between documents: neither an n-gram nor its earlier occurrence may reach beyond it."""
    frequency: NgramCounts | None = None
    max_count: int | None = None
    """n-grams with a higher count in `frequency` are no targets: a model may have learnt them by heart."""

    def distances(self, tokens: Tensor, begins: Tensor | None = None) -> Tensor:
        """How many tokens ago each target's n-gram was last seen: tokens [B,T] -> [B,T] int64, 0 where no target is."""
        if (self.frequency is None) != (self.max_count is None):
            raise ValueError("a cap on frequency needs both the counts (frequency) and the highest allowed (max_count)")
        distance = distance_to_previous(tokens, self.order, reset_token=self.reset_token, begins=begins)
        if self.frequency is None or self.max_count is None:
            return distance
        if self.max_count < 0:
            raise ValueError(f"max_count must be 0 or more, got {self.max_count}")
        if self.frequency.order != self.order:
            raise ValueError(f"the counts are of {self.frequency.order}-grams, the targets of {self.order}-grams")
        return torch.where(self.frequency.of(tokens) <= self.max_count, distance, 0)


def ar_mask(
    tokens: Tensor,
    order: int = 2,
    *,
    reset_token: int | None = None,
    frequency: NgramCounts | None = None,
    max_count: int | None = None,
) -> Tensor:
    """Where the token at t is an associative-recall target, as `ARRule` says: tokens [B,T] -> [B,T] bool."""
    return ARRule(order, reset_token, frequency, max_count).distances(tokens) > 0


def distance_to_previous(
    tokens: Tensor, order: int = 2, *, reset_token: int | None = None, begins: Tensor | None = None
) -> Tensor:
    """How many tokens ago the n-gram that ends at t was last seen: tokens [B,T] -> [B,T] int64, 0 where never.

    Documents are parted by `reset_token`, or by `begins` [B,T]: the position in its row at which t's document begins.
    """
    if tokens.ndim != 2:
        raise ValueError(f"tokens must be [B, T]; their shape is {list(tokens.shape)}")
    if order < 1:
        raise ValueError(f"order must be at least 1 (2, the paper's: repeated bigrams), got {order}")
    tokens = tokens.long()
    if tokens.numel() and int(tokens.min()) < 0:
        raise ValueError(f"tokens must be 0 or more, got {int(tokens.min())}: give inputs rather than labels")
    distance = torch.zeros_like(tokens)
    if tokens.shape[1] <= order:  # a second n-gram needs one token more
        return distance
    keys, at = ngram_keys(tokens, order).sort(dim=1, stable=True)  # equal n-grams stand side by side, earliest first
    gap = torch.where(keys[:, 1:] == keys[:, :-1], at[:, 1:] - at[:, :-1], 0)
    distance[:, order - 1 :].scatter_(1, at[:, 1:], gap)
    position = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    if reset_token is not None:
        resets = torch.where(tokens == reset_token, position, 0).cummax(1).values
        begins = resets if begins is None else torch.maximum(begins, resets)
    if begins is not None:
        # The nearest earlier occurrence is the only one to look at: if it lies before the document, so do the others.
        distance = torch.where(position - distance - (order - 1) >= begins, distance, 0)
    return distance
