"""Associative recall (AR) in text: which tokens can be predicted by looking up what followed the same tokens before."""

from typing import NamedTuple

import torch
from torch import Tensor

from rebased.evaluate.ngrams import NgramCounts, ngram_keys


class ARRule(NamedTuple):
    """Which tokens are AR: those whose n-gram (the token with the `order` - 1 before it) occurred earlier in the row.

    With bigrams (order 2), in "a b a b" only the last b is AR, in "a a a" only the last a.
    """

    order: int = 2
    reset_token: int | None = None
    """The token between documents: neither an n-gram nor its earlier occurrence may extend across it."""
    frequency: NgramCounts | None = None
    max_count: int | None = None
    """n-grams with a higher count in `frequency` are not AR, because a model may have memorised them in training."""

    def distances(self, tokens: Tensor, begins: Tensor | None = None) -> Tensor:
        """How many tokens ago each AR token's n-gram was last seen: tokens [B,T] -> [B,T] int64, 0 if not AR.

        begins [B,T] int: where in its row each token's document begins; None if rows are one document.
        """
        if (self.frequency is None) != (self.max_count is None):
            raise ValueError("a cap on frequency needs both the counts (frequency) and the highest allowed (max_count)")
        distance = distance_to_previous(tokens, self.order, reset_token=self.reset_token, begins=begins)
        if self.frequency is None or self.max_count is None:
            return distance
        if self.max_count < 0:
            raise ValueError(f"max_count must be 0 or more, got {self.max_count}")
        if self.frequency.order != self.order:
            raise ValueError(f"the counts are of {self.frequency.order}-grams, and the rule needs {self.order}-grams")
        return torch.where(self.frequency.of(tokens) <= self.max_count, distance, 0)


def distance_to_previous(
    tokens: Tensor, order: int = 2, *, reset_token: int | None = None, begins: Tensor | None = None
) -> Tensor:
    """How many tokens ago the n-gram that ends at each token was last seen: tokens [B,T] -> [B,T] int64, 0 if never.

    Documents are separated by `reset_token`, or by `begins` [B,T]: where in its row each token's document begins.
    """
    if tokens.ndim != 2:
        raise ValueError(f"tokens must be [B, T]; their shape is {list(tokens.shape)}")
    if order < 1:
        raise ValueError(f"order must be at least 1 (2, the paper's: repeated bigrams), got {order}")
    tokens = tokens.long()
    if tokens.numel() and int(tokens.min()) < 0:
        raise ValueError(f"tokens must be 0 or more, got {int(tokens.min())}: give inputs, not labels")
    distance = torch.zeros_like(tokens)
    if tokens.shape[1] <= order:  # a second n-gram needs one token more
        return distance
    keys, at = ngram_keys(tokens, order).sort(dim=1, stable=True)  # equal n-grams are neighbours, earliest first
    gap = torch.where(keys[:, 1:] == keys[:, :-1], at[:, 1:] - at[:, :-1], 0)
    distance[:, order - 1 :].scatter_(1, at[:, 1:], gap)
    position = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    if reset_token is not None:
        resets = torch.where(tokens == reset_token, position, 0).cummax(1).values
        begins = resets if begins is None else torch.maximum(begins, resets)
    if begins is not None:
        # Looking at the nearest earlier occurrence is enough: if it lies before the document, so do the others.
        distance = torch.where(position - distance - (order - 1) >= begins, distance, 0)
    return distance
