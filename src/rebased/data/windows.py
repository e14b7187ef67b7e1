"""Windows of T tokens over a stream of tokens, and the order in which training reads them."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rebased.config import plural
from rebased.data.manifest import ENDS_DTYPE, Split
from rebased.tasks.contract import IGNORE


class TextBatch(NamedTuple):
    """Windows of text as the model's inputs and labels."""

    tokens: Tensor  # [B,T] int64
    labels: Tensor  # [B,T] int64, the next token; -100 where there is nothing to predict
    cu_seqlens: Tensor | None  # [n+1] int32: where documents begin in the B*T tokens, then B*T; None without isolation


class TokenStream:
    """The tokens of a split as one sequence, memory-mapped from its shards."""

    def __init__(self, folder: Path, split: Split, dtype: np.dtype) -> None:
        self._tokens = [_map(folder / shard.token_file.file, dtype) for shard in split.shards]
        self._ends = [_map(folder / shard.ends_file.file, ENDS_DTYPE) for shard in split.shards]
        self._starts = np.cumsum([0, *(len(shard) for shard in self._tokens)])  # [shards+1]

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens start to stop - 1, [stop - start] uint16 or uint32."""
        found = [self._tokens[shard][first:last] for shard, first, last in self._overlaps(start, stop)]
        return found[0] if len(found) == 1 else np.concatenate(found)

    def document_ends(self, start: int, stop: int) -> np.ndarray:
        """[n] int64: the positions e in (start, stop] where a document ends with token e - 1."""
        found = [np.empty(0, dtype=np.int64)]
        for shard, first, last in self._overlaps(start, stop):
            ends = self._ends[shard]
            inside = ends[np.searchsorted(ends, first, side="right") : np.searchsorted(ends, last, side="right")]
            found.append(inside + self._starts[shard])
        return np.concatenate(found)

    def _overlaps(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """(shard, first, last) for each shard that overlaps [start, stop): its tokens first to last - 1 do."""
        shard = int(np.searchsorted(self._starts, start, side="right")) - 1
        found = []
        while start < stop:
            begin, end = int(self._starts[shard]), min(stop, int(self._starts[shard + 1]))
            found.append((shard, start - begin, end - begin))
            start, shard = end, shard + 1
        return found


def _map(path: Path, dtype: np.dtype) -> np.ndarray:
    if path.stat().st_size == 0:  # an empty file cannot be mapped: no document ends in this shard
        return np.empty(0, dtype=dtype)
    return np.memmap(path, dtype=dtype, mode="r")


class Windows:
    """Consecutive windows of T = `seq_len` tokens over a stream.

    Window i holds tokens i*T to i*T + T - 1, and its labels are tokens i*T + 1 to i*T + T. So one pass predicts each
    token once, except the first. The last window is padded with token 0 and label -100.

    With `isolate_documents` no label is the first token of a document, and `cu_seqlens` says where documents begin, so
    that a model can keep them apart.
    """

    def __init__(self, stream: TokenStream, seq_len: int, *, isolate_documents: bool = False) -> None:
        if seq_len < 1:
            raise ValueError(f"seq_len must be at least 1, got {seq_len}")
        if len(stream) < 2:
            raise ValueError(
                f"this split has {plural(len(stream), 'token')}; to predict one needs at least 2; prepare more text"
            )
        self.seq_len, self.isolate_documents = seq_len, isolate_documents
        self._stream = stream
        self._n_windows = -(-(len(stream) - 1) // seq_len)

    def __len__(self) -> int:
        return self._n_windows

    def batch(self, rows: Sequence[int] | Tensor) -> TextBatch:
        """The windows with these indices, B of them, on the CPU."""
        length = self.seq_len
        starts = [int(row) * length for row in rows]
        if not starts or min(starts) < 0 or max(starts) >= self._n_windows * length:
            raise ValueError(f"rows must be some of 0 to {self._n_windows - 1}, got {[s // length for s in starts]}")
        tokens = np.zeros((len(starts), length), dtype=np.int64)  # [B,T]
        labels = np.full((len(starts), length), IGNORE, dtype=np.int64)  # [B,T]
        begins = [np.arange(len(starts) + 1) * length]  # every row begins a document or continues one
        for i, start in enumerate(starts):
            window = self._stream.read(start, min(start + length + 1, len(self._stream)))  # [<= T+1]
            filled = len(window) - 1
            tokens[i, : min(len(window), length)] = window[:length]
            labels[i, :filled] = window[1:]
            if self.isolate_documents:
                ends = self._stream.document_ends(start, start + filled) - start  # in (0, filled]
                labels[i, ends - 1] = IGNORE
                begins.append(i * length + ends[ends < length])
        cu_seqlens = None
        if self.isolate_documents:
            cu_seqlens = torch.from_numpy(np.unique(np.concatenate(begins)).astype(np.int32))
        return TextBatch(torch.from_numpy(tokens), torch.from_numpy(labels), cu_seqlens)


def window_rows(n_windows: int, batch_size: int, seed: int, step: int) -> Tensor:
    """[batch_size] int64: the indices of the windows in the batch of global step `step` (from 0).

    Every window comes once per epoch, and each epoch has its own order. A batch may span two epochs. The result depends
    on the arguments alone and costs O(batch_size) for any number of windows, so there is no sampler state to save. With
    several workers each takes its slice of the rows.
    """
    if n_windows < 1 or batch_size < 1:
        raise ValueError(f"n_windows and batch_size must be at least 1, got {n_windows} and {batch_size}")
    if seed < 0 or step < 0:
        raise ValueError(f"seed and step must be 0 or more, got {seed} and {step}")
    places = step * batch_size + np.arange(batch_size)  # positions in the infinite sequence of epochs
    epochs = places // n_windows
    rows = np.empty(batch_size, dtype=np.int64)
    for epoch in range(int(epochs[0]), int(epochs[-1]) + 1):
        here = epochs == epoch
        rows[here] = _shuffled(places[here] - epoch * n_windows, n_windows, seed, epoch)
    return torch.from_numpy(rows)


def spread_rows(n_windows: int, wanted: int | None) -> Sequence[int]:
    """The indices of `wanted` windows at even distances, from the first on; all of them if `wanted` is None."""
    if wanted is None or wanted >= n_windows:
        return range(n_windows)
    if wanted < 1:
        raise ValueError(f"{wanted} windows cannot be chosen; give 1 or more")
    return [i * n_windows // wanted for i in range(wanted)]


ROUNDS = 6  # of the Feistel network


def _shuffled(places: np.ndarray, n: int, seed: int, epoch: int) -> np.ndarray:
    """Where a permutation of 0 to n - 1, chosen by (seed, epoch), maps these places.

    It is a Feistel network over the next power of four, applied again until the result is below n. A permutation in
    memory would need 8 bytes per window.
    """
    half = np.uint64(max(1, -(-(n - 1).bit_length() // 2)))
    mask = (np.uint64(1) << half) - np.uint64(1)
    keys = np.random.SeedSequence(seed, spawn_key=(epoch,)).generate_state(ROUNDS, np.uint64)
    rows = places.astype(np.uint64)
    outside = np.ones(len(rows), dtype=bool)
    while outside.any():
        left, right = rows[outside] >> half, rows[outside] & mask
        for key in keys:
            left, right = right, left ^ (_scramble(right ^ key) & mask)
        rows[outside] = (left << half) | right
        outside = rows >= n
    return rows.astype(np.int64)


def _scramble(x: np.ndarray) -> np.ndarray:
    """Mix the bits of x, uint64: each bit of the result depends on all bits of x (the finaliser of splitmix64)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
