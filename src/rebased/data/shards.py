"""Write shards: the tokens and document ends of each split. A shard appears complete or not at all."""

import errno
import hashlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from rebased.data.manifest import DTYPES, ENDS_DTYPE, Shard, ShardFile, TokenizerFile, sum_known
from rebased.data.tokenizer import Tokenizer
from rebased.files import replacing, sha256_bytes

TOKENIZER_FILE = "tokenizer.json"


class Encoded(NamedTuple):
    """Consecutive tokens of one split."""

    tokens: np.ndarray  # [n] any unsigned dtype
    ends: np.ndarray  # [documents] int64: how many of these tokens come before each document's end
    text_bytes: int | None  # bytes of UTF-8 that the tokens stand for; None if not known
    source_bytes: int = 0
    invalid: int = 0  # how many byte sequences were not UTF-8


class ShardGroup:
    """The shards of one index, one per split: `train-00003.bin`, `valid-00003.bin`, ... Made by `writing_shards`.

    A split to which nothing is appended gets no file.
    """

    def __init__(self, folder: Path, index: int, dtype: str, stack: ExitStack) -> None:
        self._folder, self._index, self._dtype, self._stack = folder, index, DTYPES[dtype], stack
        self._shards: dict[str, _OpenShard] = {}

    def append(self, split: str, encoded: Encoded) -> None:
        """Add tokens to the end of a split's shard."""
        if not len(encoded.tokens):
            return
        if split not in self._shards:
            name = f"{split}-{self._index:05}"
            files = [self._stack.enter_context(replacing(self._folder / f"{name}.{kind}")) for kind in ("bin", "ends")]
            self._shards[split] = _OpenShard(name, *files)
        self._shards[split].append(encoded, self._dtype)

    def finish(self, source: str = "") -> dict[str, Shard]:
        """The manifest's entry of each split's shard. Nothing can be appended afterwards."""
        return {split: shard.finish(source) for split, shard in self._shards.items()}


@contextmanager
def writing_shards(folder: Path, index: int, dtype: str) -> Iterator[ShardGroup]:
    """A `ShardGroup` to write. All its files appear when the block ends; on an error none of them does."""
    try:
        with ExitStack() as stack:
            yield ShardGroup(folder, index, dtype, stack)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise ValueError(
                f"{folder}: {error.strerror}; the shards finished so far are kept: "
                "make room, then run the same command with --resume"
            ) from error
        raise


class _OpenShard:
    def __init__(self, name: str, file: BinaryIO, ends_file: BinaryIO) -> None:
        self._name, self._file, self._ends_file = name, file, ends_file
        self._hash = hashlib.sha256()
        self._tokens = 0
        self._ends: list[np.ndarray] = []
        self._text_bytes: int | None = 0

    def append(self, encoded: Encoded, dtype: np.dtype) -> None:
        content = encoded.tokens.astype(dtype, copy=False).tobytes()
        self._file.write(content)
        self._hash.update(content)
        self._ends.append(encoded.ends + self._tokens)
        self._tokens += len(encoded.tokens)
        self._text_bytes = sum_known((self._text_bytes, encoded.text_bytes))

    def finish(self, source: str) -> Shard:
        ends = np.concatenate(self._ends).astype(ENDS_DTYPE)
        self._ends_file.write(ends.tobytes())
        return Shard(
            tokens=self._tokens,
            documents=len(ends),
            text_bytes=self._text_bytes,
            token_file=ShardFile(file=f"{self._name}.bin", sha256=self._hash.hexdigest()),
            ends_file=ShardFile(file=f"{self._name}.ends", sha256=sha256_bytes(ends.tobytes())),
            source=source,
        )


def store_tokenizer(folder: Path, tokenizer: Tokenizer) -> TokenizerFile:
    """Write tokenizer.json to `folder`, if the tokenizer has one, and return the manifest's entry for it."""
    content, file = tokenizer.to_json(), None
    if content is not None:
        with replacing(folder / TOKENIZER_FILE) as written:
            written.write(content)
        file = ShardFile(file=TOKENIZER_FILE, sha256=sha256_bytes(content))
    return TokenizerFile(
        name=tokenizer.name, file=file, vocab_size=tokenizer.vocab_size, end_of_text=tokenizer.end_of_text
    )
