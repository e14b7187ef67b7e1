"""n-grams as integer keys without collisions, and how often each occurs in a stream of tokens."""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from rebased.data.windows import TokenStream

INT64 = 2**63
TOKENS_AT_ONCE = 2**22


def ngram_keys(tokens: Tensor, order: int) -> Tensor:
    """A key for each n-gram: tokens [B,T] int64 -> [B,T-order+1] int64. Keys are equal only for equal n-grams.

    Keys of different calls cannot be compared: where vocab_size^order does not fit into 64 bits, they are ranks among
    the n-grams of this call.
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
    """(the rank of each value among the distinct ones, how many distinct ones there are)."""
    distinct, ranks = torch.unique(values, return_inverse=True)
    return ranks, len(distinct)


class NgramCounts(NamedTuple):
    """How often n-grams occur in a text, such as the training split of a model."""

    order: int
    vocab_size: int
    keys: Tensor  # [N] int64, sorted: the counted n-grams, as `stable_keys`
    counts: Tensor  # [N] int64

    def of(self, tokens: Tensor) -> Tensor:
        """The count of the n-gram that ends at each token: [B,T] int -> [B,T] int64, 0 if unknown or incomplete."""
        keys = stable_keys(tokens, self.order, self.vocab_size)  # [B,T-n+1]
        found = torch.zeros(tokens.shape, dtype=torch.long, device=tokens.device)
        if len(self.keys) and keys.numel():
            known, counts = self.keys.to(tokens.device), self.counts.to(tokens.device)
            at = torch.searchsorted(known, keys).clamp(max=len(known) - 1)
            found[:, self.order - 1 :] = torch.where(known[at] == keys, counts[at], 0)
        return found


def count_ngrams(stream: Iterable[Tensor], order: int, vocab_size: int, *, among: Iterable[Tensor]) -> NgramCounts:
    """Count in `stream` the n-grams that occur in `among`. Both are batches of rows [B,T] int64.

    Memory depends on the size of `among`, not on the length of `stream`.
    """
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
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> NgramCounts:
    """Count in `stream` the n-grams that occur in `among`.

    `on_progress(done, total)` is called after each chunk, with numbers of tokens of `stream`.
    """

    def chunks(tokens: TokenStream, on_progress: Callable[[int, int], None]) -> Iterator[Tensor]:
        for start in range(0, len(tokens), TOKENS_AT_ONCE):  # each overlaps the next, so that no n-gram is lost
            chunk = tokens.read(start, min(start + TOKENS_AT_ONCE + order - 1, len(tokens)))
            yield torch.from_numpy(chunk.astype("int64"))[None]
            on_progress(min(start + TOKENS_AT_ONCE, len(tokens)), len(tokens))

    wanted = chunks(among, lambda done, total: None)
    return count_ngrams(chunks(stream, on_progress), order, vocab_size, among=wanted)


def stable_keys(tokens: Tensor, order: int, vocab_size: int) -> Tensor:
    """A key for each n-gram, the same in every call: tokens [B,T] int -> [B,T-order+1] int64.

    The tokens are digits of the key in base vocab_size. Raises ValueError if that does not fit into 64 bits.
    """
    if vocab_size**order >= INT64:
        raise ValueError(
            f"n-grams of order {order} over {vocab_size} tokens do not fit into 64 bits; "
            "to cap training frequency choose a lower order"
        )
    if tokens.numel() and int(tokens.max()) >= vocab_size:
        raise ValueError(f"token {int(tokens.max())} is outside the vocabulary of {vocab_size} tokens")
    width = max(tokens.shape[1] - order + 1, 0)
    keys = torch.zeros(tokens.shape[0], width, dtype=torch.long, device=tokens.device)
    for i in range(order):
        keys = keys * vocab_size + tokens[:, i : i + width]
    return keys
