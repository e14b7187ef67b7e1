"""A prepared folder: its splits as memory-mapped token streams, and its tokenizer."""

import logging
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path

from rebased.config import did_you_mean
from rebased.data.encode import ChunkBatch, ChunkEncoder
from rebased.data.manifest import (
    DTYPES,
    FORMAT,
    Manifest,
    Split,
    dtype_for,
    read_manifest,
    verify_file,
    verify_files,
    write_manifest,
)
from rebased.data.shards import store_tokenizer, writing_shards
from rebased.data.splits import Chunk
from rebased.data.tokenizer import Tokenizer, load_tokenizer, restore_tokenizer, vocabulary_digest
from rebased.data.windows import TokenStream, Windows

logger = logging.getLogger("rebased")

SMALL_BYTES = 2 * 10**9  # of tokens: their checksums take a few seconds


class Corpus:
    """The text in a folder that `rebased data prepare` wrote.

    Every file must exist and have the right size. With `verify` every file is also read once and its checksum compared.

    Attributes: `folder`, `manifest`, `vocab_size` (int) and `end_of_text` (the token after each document, or None).
    """

    def __init__(self, folder: Path | str, *, verify: bool = False) -> None:
        self.folder = Path(folder)
        self.manifest = read_manifest(self.folder)
        if verify:
            verify_files(self.folder, self.manifest, self.splits)
        self.vocab_size = self.manifest.tokenizer.vocab_size
        self.end_of_text = self.manifest.tokenizer.end_of_text

    @property
    def splits(self) -> dict[str, Split]:
        """The splits by name. Each has `.tokens`, `.documents` and `.text_bytes` (for bits per byte)."""
        return self.manifest.splits

    def verify_if_small(self, *splits: str) -> bool:
        """Compare the checksums of these splits (default: all) if they are small enough for that to take seconds.

        If they are larger, nothing is read: a warning is logged and False returned. `rebased data verify` compares any
        size.
        """
        chosen = splits or tuple(self.splits)
        if sum(self._split(name).tokens for name in chosen) * DTYPES[self.manifest.dtype].itemsize > SMALL_BYTES:
            logger.warning("%s is large: its checksums are compared only by `rebased data verify`", self.folder)
            return False
        verify_files(self.folder, self.manifest, chosen)
        return True

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the tokens, loaded from the folder."""
        entry = self.manifest.tokenizer
        return restore_tokenizer(self._tokenizer_json(), entry.name, entry.end_of_text)

    @cached_property
    def vocabulary(self) -> str:
        """A digest of the vocabulary. Two corpora share it if each token id means the same in both."""
        return vocabulary_digest(self._tokenizer_json())

    def _tokenizer_json(self) -> bytes | None:
        file = self.manifest.tokenizer.file
        if file is None:
            return None
        verify_file(self.folder, file)
        return (self.folder / file.file).read_bytes()

    def windows(self, split: str, seq_len: int, *, isolate_documents: bool = False) -> Windows:
        """The windows of `seq_len` tokens of a split; see `Windows` for `isolate_documents`."""
        return Windows(self.stream(split), seq_len, isolate_documents=isolate_documents)

    def stream(self, split: str) -> TokenStream:
        """All tokens of a split as one sequence."""
        return TokenStream(self.folder, self._split(split), DTYPES[self.manifest.dtype])

    def _split(self, name: str) -> Split:
        if name not in self.splits:
            raise ValueError(f"{self.folder} has no split {name!r}; {did_you_mean(name, list(self.splits))}")
        return self.splits[name]


def write_corpus(folder: Path, documents: Mapping[str, Iterable[str]], tokenizer: str = "bytes") -> None:
    """Write documents, given by split, to a new or empty folder that `Corpus` can read.

    For example {"train": ["one document", "another"], "valid": ["a third"]}. `prepare` does this for files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty; choose another folder")
    loaded = load_tokenizer(tokenizer)
    encode = ChunkEncoder(loaded, field="", stop_at_invalid=True)
    dtype, entry = dtype_for(loaded.vocab_size), store_tokenizer(folder, loaded)
    with writing_shards(folder, 0, dtype) as group:
        for split, texts in documents.items():
            chunks = [Chunk("text", text.encode(), True, "memory", "") for text in texts]
            group.append(split, encode(ChunkBatch(split, chunks, 0, 0)))
        shards = group.finish()
    splits = {split: Split(shards=(shard,)) for split, shard in shards.items()}
    write_manifest(folder, Manifest(format=FORMAT, dtype=dtype, tokenizer=entry, splits=splits))
