"""From parts of documents to tokens: the work that is spread over processes. What it gives depends on nothing else."""

import json
from functools import cached_property
from typing import NamedTuple

import numpy as np

from rebased.data.shards import Encoded
from rebased.data.sources import text_of
from rebased.data.splits import Part
from rebased.data.tokenizer import Tokenizer


class Piece(NamedTuple):
    """Parts that one process encodes at once, all of one split."""

    split: str
    parts: list[Part]
    shard: int  # that its tokens go to
    done: int  # bytes on disk read when it was made


class EncodedPiece(NamedTuple):
    encoded: Encoded
    source_bytes: int
    invalid: int  # sequences that were not UTF-8


class PieceEncoder:
    def __init__(self, tokenizer: Tokenizer, field: str, stop_at_invalid: bool) -> None:
        self._tokenizer, self._field, self._stop = tokenizer, field, stop_at_invalid
        end = tokenizer.end_of_text
        self._end = np.empty(0, dtype=np.uint32) if end is None else np.array([end], dtype=np.uint32)

    @cached_property
    def _byte_lengths(self) -> np.ndarray | None:
        return self._tokenizer.byte_lengths()

    def __call__(self, piece: Piece) -> EncodedPiece:
        texts, invalid = [], 0
        for part in piece.parts:
            if part.kind != "tokens":
                text, bad = self._text(part)
                texts.append(text)
                invalid += bad
        ids = iter(self._tokenizer.encode_many(texts))
        tokens, ends, position = [np.empty(0, dtype=np.uint32)], [], 0
        text_bytes: int | None = sum(map(len, texts))
        for part in piece.parts:
            if part.kind == "tokens":
                found = self._tokens(part)
                inner = np.flatnonzero(found == self._tokenizer.end_of_text) + 1  # documents within: packed windows
                ends += [position + end for end in inner.tolist() if end < len(found) or not part.ends]
                text_bytes = self._add_bytes(text_bytes, found)
            else:
                found = next(ids)
                if part.ends:
                    found = np.concatenate([found, self._end])
            tokens.append(found)
            position += len(found)
            if part.ends:
                ends.append(position)
        encoded = Encoded(np.concatenate(tokens), np.array(ends, dtype=np.int64), text_bytes)
        return EncodedPiece(encoded, sum(len(part.data) for part in piece.parts), invalid)

    def _text(self, part: Part) -> tuple[bytes, int]:
        """(UTF-8, how much of it had to be replaced)."""
        if part.kind == "text":
            data = part.data
        else:
            try:
                row = json.loads(part.data)
            except ValueError as error:
                raise ValueError(f"{part.source} is not JSON: {error}") from error
            data = text_of(row, self._field, part.source).encode("utf-8", "surrogatepass")  # found just below
        try:
            data.decode()
            return data, 0
        except UnicodeDecodeError as error:
            if self._stop:
                raise ValueError(
                    f"{part.source}: not UTF-8: {data[error.start : error.end]!r} after "
                    f"{data[max(0, error.start - 30) : error.start].decode(errors='replace')!r}; "
                    "--invalid-utf8 replace goes on and counts such places"
                ) from error
        replaced = data.decode(errors="replace")
        return replaced.encode(), replaced.count("\ufffd") - data.count("\ufffd".encode())

    def _tokens(self, part: Part) -> np.ndarray:
        found = np.frombuffer(part.data, dtype=part.dtype)
        least, most = int(found.min()), int(found.max())
        if least < 0 or most >= self._tokenizer.vocab_size:
            raise ValueError(
                f"{part.source} has token {least if least < 0 else most}, which is not in the vocabulary of "
                f"{self._tokenizer.name} (0 to {self._tokenizer.vocab_size - 1}); "
                "name the tokenizer that made it (--tokenizer)"
            )
        return found.astype(np.uint32)

    def _add_bytes(self, text_bytes: int | None, found: np.ndarray) -> int | None:
        if text_bytes is None or self._byte_lengths is None:
            return None
        return text_bytes + int(self._byte_lengths[found].sum())
