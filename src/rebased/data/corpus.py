"""A prepared folder: its splits as memory-mapped token streams, and the tokenizer that made them."""

from functools import cached_property
from pathlib import Path

import numpy as np

from rebased.config import did_you_mean
from rebased.data.manifest import DTYPES, ENDS_DTYPE, Split, read_manifest, verify_file, verify_files
from rebased.data.tokenizer import Tokenizer, restore_tokenizer, vocabulary_digest
from rebased.data.windows import Windows

SOON = 2 * 10**9  # bytes of tokens that are read in a few seconds


class Corpus:
    """What `rebased data prepare` wrote. `verify` reads every file once and compares checksums; without it, that all
    files are there and as long as they should be."""

    def __init__(self, folder: Path | str, *, verify: bool = False) -> None:
        self.folder = Path(folder)
        self.manifest = read_manifest(self.folder)
        if verify:
            verify_files(self.folder, self.manifest, self.splits)
        self.vocab_size = self.manifest.tokenizer.vocab_size
        self.end_of_text = self.manifest.tokenizer.end_of_text

    @property
    def splits(self) -> dict[str, Split]:
        """By name: `.tokens`, `.documents`, and `.text_bytes` for bits per byte."""
        return self.manifest.splits

    def verify_soon(self, *splits: str) -> bool:
        """Compare the checksums of these splits (default: all) if that takes seconds. False: they are too large, and
        `rebased data check` is for them."""
        chosen = splits or tuple(self.splits)
        if sum(self._split(name).tokens for name in chosen) * DTYPES[self.manifest.dtype].itemsize > SOON:
            return False
        verify_files(self.folder, self.manifest, chosen)
        return True

    @cached_property
    def tokenizer(self) -> Tokenizer:
        entry = self.manifest.tokenizer
        return restore_tokenizer(self._tokenizer_json(), entry.name, entry.end_of_text)

    @cached_property
    def vocabulary(self) -> str:
        """A digest: texts whose numbers stand for the same tokens share it."""
        return vocabulary_digest(self._tokenizer_json())

    def _tokenizer_json(self) -> bytes | None:
        file = self.manifest.tokenizer.file
        if file is None:
            return None
        verify_file(self.folder, file)
        return (self.folder / file.file).read_bytes()

    def windows(self, split: str, seq_len: int, *, isolate_documents: bool = False) -> Windows:
        return Windows(self.stream(split), seq_len, isolate_documents=isolate_documents)

    def stream(self, split: str) -> "SplitStream":
        return SplitStream(self.folder, self._split(split), DTYPES[self.manifest.dtype])

    def _split(self, name: str) -> Split:
        if name not in self.splits:
            raise ValueError(f"{self.folder} has no split {name!r}; {did_you_mean(name, list(self.splits))}")
        return self.splits[name]


class SplitStream:
    """One long row of tokens over the shards of a split."""

    def __init__(self, folder: Path, split: Split, dtype: np.dtype) -> None:
        self._tokens = [_map(folder / shard.token_file.file, dtype) for shard in split.shards]
        self._ends = [_map(folder / shard.ends_file.file, ENDS_DTYPE) for shard in split.shards]
        self._starts = np.cumsum([0, *(len(shard) for shard in self._tokens)])  # [shards+1]

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, start: int, stop: int) -> np.ndarray:
        parts = [self._tokens[shard][first:last] for shard, first, last in self._overlaps(start, stop)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def document_ends(self, start: int, stop: int) -> np.ndarray:
        """Positions e in (start, stop] where one document has ended and another begins with token e."""
        parts = [np.empty(0, dtype=np.int64)]
        for shard, first, last in self._overlaps(start, stop):
            ends = self._ends[shard]
            inside = ends[np.searchsorted(ends, first, side="right") : np.searchsorted(ends, last, side="right")]
            parts.append(inside + self._starts[shard])
        return np.concatenate(parts)

    def _overlaps(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """(shard, first, last): the part of each shard that lies in [start, stop)."""
        shard = int(np.searchsorted(self._starts, start, side="right")) - 1
        found = []
        while start < stop:
            begin, end = int(self._starts[shard]), min(stop, int(self._starts[shard + 1]))
            found.append((shard, start - begin, end - begin))
            start, shard = end, shard + 1
        return found


def _map(path: Path, dtype: np.dtype) -> np.ndarray:
    if path.stat().st_size == 0:  # which cannot be mapped: a shard in which no document ends
        return np.empty(0, dtype=dtype)
    return np.memmap(path, dtype=dtype, mode="r")
