"""n-grams as single numbers, without collisions; and how often each occurs in a stream of tokens."""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

INT64 = 2**63
AT_ONCE = 2**22  # tokens of a stream


class TokenStream(Protocol):
    """One long row of tokens, such as a split of a prepared text."""

    def __len__(self) -> int: ...
    def read(self, start: int, stop: int) -> np.ndarray: ...


def ngram_keys(tokens: Tensor, order: int) -> Tensor:
    """A number for each n-gram: tokens [B,T] int64 -> [B,T-order+1], equal where, and only where, all tokens are equal.

    The numbers mean nothing beyond this call: where the vocabulary is too large for its power to fit into 64 bits,
    they are ranks among the n-grams at hand.
    """
    size = int(tokens.max()) + 1 if tokens.numel() else 1
    digits = tokens
    if size**order >= INT64:
        digits, size = _ranks(digits)
    keys, bound = digits, size
    for _ in range(order - 1):
        if bound * size >= INT64:
            keys, bound = _ranks(keys)
        keys = keys[:, :-1] * size + digits[:, digits.shape[1] - keys.shape[1] + 1 :]
        bound *= size
    return keys


def _ranks(values: Tensor) -> tuple[Tensor, int]:
    distinct, ranks = torch.unique(values, return_inverse=True)
    return ranks, len(distinct)


class NgramCounts(NamedTuple):
    """How often n-grams occur in some text, such as the one a model was trained on."""

    order: int
    vocab_size: int
    keys: Tensor  # [N] int64, sorted: the n-grams that were asked for, as numbers to the base vocab_size
    counts: Tensor  # [N] int64

    def of(self, tokens: Tensor) -> Tensor:
        """The count of the n-gram that ends at each token: [B,T] -> [B,T], 0 where none ends or it was never seen."""
        keys = stable_keys(tokens, self.order, self.vocab_size)  # [B,T-n+1]
        found = torch.zeros(tokens.shape, dtype=torch.long, device=tokens.device)
        if len(self.keys) and keys.numel():
            known, counts = self.keys.to(tokens.device), self.counts.to(tokens.device)
            at = torch.searchsorted(known, keys).clamp(max=len(known) - 1)
            found[:, self.order - 1 :] = torch.where(known[at] == keys, counts[at], 0)
        return found


def count_ngrams(
    stream: Iterable[Tensor], order: int, vocab_size: int, *, among: Iterable[Tensor] | None = None
) -> NgramCounts:
    """Count the n-grams of the rows [B,T] of a stream, those that occur `among` other rows alone if these are given:
    then memory is bounded by the text to be judged, however long the text that is counted."""
    if among is None:
        keys, counts = torch.empty(0, dtype=torch.long), torch.empty(0, dtype=torch.long)
        for rows in stream:
            more, n = stable_keys(rows, order, vocab_size).unique(return_counts=True)
            keys, place = torch.cat([keys, more]).unique(return_inverse=True)
            counts = torch.zeros_like(keys).index_add_(0, place, torch.cat([counts, n]))
        return NgramCounts(order, vocab_size, keys, counts)
    keys = torch.empty(0, dtype=torch.long)
    for rows in among:
        keys = torch.cat([keys, stable_keys(rows, order, vocab_size).flatten()]).unique()
    counts = torch.zeros_like(keys)
    for rows in stream:
        seen = stable_keys(rows, order, vocab_size).flatten()
        if len(keys):
            at = torch.searchsorted(keys, seen).clamp(max=len(keys) - 1)
            counts += torch.bincount(at[keys[at] == seen], minlength=len(keys))
    return NgramCounts(order, vocab_size, keys, counts)


def count_stream(
    stream: TokenStream,
    order: int,
    vocab_size: int,
    *,
    among: TokenStream,
    progress: Callable[[int], None] | None = None,
) -> NgramCounts:
    """Count in one long row of tokens the n-grams that another has. progress: called with the tokens read so far."""

    def pieces(of: TokenStream, tell: Callable[[int], None] | None = None) -> Iterator[Tensor]:
        for start in range(0, len(of), AT_ONCE):  # each reaches into the next, so that no n-gram is lost
            tokens = of.read(start, min(start + AT_ONCE + order - 1, len(of)))
            yield torch.from_numpy(tokens.astype("int64"))[None]
            if tell is not None:
                tell(min(start + AT_ONCE, len(of)))

    return count_ngrams(pieces(stream, progress), order, vocab_size, among=pieces(among))


def stable_keys(tokens: Tensor, order: int, vocab_size: int) -> Tensor:
    """Numbers that mean the same in every call: digits to the base vocab_size. tokens [B,T] -> [B,T-order+1]."""
    if vocab_size**order >= INT64:
        raise ValueError(
            f"n-grams of order {order} over {vocab_size} tokens do not fit into 64 bits; "
            "to cap training frequency choose a lower order"
        )
    if tokens.numel() and int(tokens.max()) >= vocab_size:
        raise ValueError(f"token {int(tokens.max())} is outside the vocabulary of {vocab_size}")
    width = max(tokens.shape[1] - order + 1, 0)
    keys = torch.zeros(tokens.shape[0], width, dtype=torch.long, device=tokens.device)
    for i in range(order):
        keys = keys * vocab_size + tokens[:, i : i + width]
    return keys
