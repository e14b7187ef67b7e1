"""Encode chunks of documents as tokens. This is the work that is spread over threads."""

from functools import cached_property
from typing import NamedTuple

import numpy as np

from rebased.data.manifest import sum_known
from rebased.data.shards import Encoded
from rebased.data.sources import text_of
from rebased.data.splits import Chunk
from rebased.data.tokenizer import Tokenizer
from rebased.files import parse_json


class ChunkBatch(NamedTuple):
    """Chunks of one split that are encoded together."""

    split: str
    chunks: list[Chunk]
    shard: int  # index of the shard that the tokens go to
    done: int  # bytes read from disk when the batch was made, for progress
    source: str = ""  # of a recipe


class ChunkEncoder:
    """A function from `ChunkBatch` to `Encoded`. The result depends on its arguments alone.

    `field` is the key of the text in JSON lines. With `stop_at_invalid` text that is not UTF-8 raises ValueError;
    without, each invalid byte sequence is replaced by U+FFFD and counted.
    """

    def __init__(self, tokenizer: Tokenizer, field: str, stop_at_invalid: bool) -> None:
        self._tokenizer, self._field, self._stop = tokenizer, field, stop_at_invalid
        end = tokenizer.end_of_text
        self._end = np.empty(0, dtype=np.uint32) if end is None else np.array([end], dtype=np.uint32)

    @cached_property
    def _byte_lengths(self) -> np.ndarray | None:
        return self._tokenizer.byte_lengths()

    def __call__(self, batch: ChunkBatch) -> Encoded:
        texts, invalid = [], 0
        for chunk in batch.chunks:
            if chunk.kind != "tokens":
                text, bad = self._text(chunk)
                texts.append(text)
                invalid += bad
        ids = iter(self._tokenizer.encode_many(texts))
        tokens, ends, position = [np.empty(0, dtype=np.uint32)], [], 0
        text_bytes: list[int | None] = [len(text) for text in texts]
        for chunk in batch.chunks:
            if chunk.kind == "tokens":
                found = self._tokens(chunk)
                # Tokenised documents may be windows that pack several: each end-of-text token ends one.
                inner = np.flatnonzero(found == self._tokenizer.end_of_text) + 1
                ends += [position + end for end in inner.tolist() if end < len(found) or not chunk.is_last]
                text_bytes.append(None if self._byte_lengths is None else int(self._byte_lengths[found].sum()))
            else:
                found = next(ids)
                if chunk.is_last:
                    found = np.concatenate([found, self._end])
            tokens.append(found)
            position += len(found)
            if chunk.is_last:
                ends.append(position)
        source_bytes = sum(len(chunk.data) for chunk in batch.chunks)
        known = sum_known(text_bytes)
        return Encoded(np.concatenate(tokens), np.array(ends, dtype=np.int64), known, source_bytes, invalid)

    def _text(self, chunk: Chunk) -> tuple[bytes, int]:
        """(the chunk's text as UTF-8, how many invalid sequences were replaced)."""
        if chunk.kind == "text":
            data = chunk.data
        else:
            row = parse_json(chunk.data, chunk.source)
            # JSON can hold lone surrogates, which are not UTF-8 either: they are found just below.
            data = text_of(row, self._field, chunk.source).encode("utf-8", "surrogatepass")
        try:
            data.decode()
            return data, 0
        except UnicodeDecodeError as error:
            if self._stop:
                raise ValueError(
                    f"{chunk.source}: not UTF-8: {data[error.start : error.end]!r} after "
                    f"{data[max(0, error.start - 30) : error.start].decode(errors='replace')!r}; "
                    "--invalid-utf8 replace goes on and counts such places"
                ) from error
        replaced = data.decode(errors="replace")
        return replaced.encode(), replaced.count("\ufffd") - data.count("\ufffd".encode())

    def _tokens(self, chunk: Chunk) -> np.ndarray:
        """The tokens of a tokenised chunk, uint32; ValueError if one is outside the vocabulary."""
        found = np.frombuffer(chunk.data, dtype=chunk.dtype)
        smallest, largest = int(found.min()), int(found.max())
        if smallest < 0 or largest >= self._tokenizer.vocab_size:
            raise ValueError(
                f"{chunk.source} has token {smallest if smallest < 0 else largest}, which is not in the vocabulary of "
                f"{self._tokenizer.name} (0 to {self._tokenizer.vocab_size - 1}); "
                "name the tokenizer that made it (--tokenizer)"
            )
        return found.astype(np.uint32)
