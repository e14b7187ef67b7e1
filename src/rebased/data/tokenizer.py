"""Tokenizers: text to token ids and back. Either one token per byte, or any tokenizer.json."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from rebased.data.sources import open_text
from rebased.files import sha256_bytes

END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]", "<|im_end|>")
"""Usual names of the token that ends a document, tried in this order."""
TOKENIZER_BYTES = 2**28
"""The largest tokenizer.json that is read, unpacked; those of 250,000 tokens have a tenth of it."""


class Tokenizer(Protocol):
    """Text to token ids and back."""

    name: str
    vocab_size: int  # the largest token id plus 1
    end_of_text: int | None  # the token after each document; `encode` does not add it

    def encode(self, text: str) -> list[int]:
        """The token ids of a text. Names of special tokens in the text are encoded as ordinary text."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, without special tokens."""

    def encode_many(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """The token ids of each text, [n] of an unsigned dtype. Bytes that are not UTF-8 are encoded as U+FFFD."""

    def byte_lengths(self) -> np.ndarray | None:
        """[vocab_size] int64: how many bytes of text each token stands for; None if that depends on its neighbours."""

    def to_json(self) -> bytes | None:
        """The content of tokenizer.json; None if the tokenizer needs no file."""


class ByteTokenizer(Tokenizer):
    """One token per byte, 0 to 255, and 256 after each document. It needs no file and encodes any text."""

    name = "bytes"
    vocab_size = 257
    end_of_text: int | None = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        # An incomplete UTF-8 character becomes U+FFFD.
        return bytes(token for token in map(int, ids) if token < 256).decode(errors="replace")

    def encode_many(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        return [np.frombuffer(text, dtype=np.uint8) for text in texts]

    def byte_lengths(self) -> np.ndarray | None:
        return np.array([1] * 256 + [0])

    def to_json(self) -> bytes | None:
        return None


class JsonTokenizer(Tokenizer):
    """The tokenizer that a tokenizer.json describes, run by the `tokenizers` library.

    `content` is the file, `name` is for messages and records. `end_of_text` is the token after each document: None for
    the first of END_NAMES in the vocabulary, "" for none.
    """

    def __init__(self, content: bytes, name: str, end_of_text: str | None = None) -> None:
        self._content = content
        self._tokenizer = _load(content, name)
        self.name = name
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise ValueError(f"the vocabulary of tokenizer {name} is empty")
        self.vocab_size = max(vocabulary.values()) + 1  # ids may have gaps; a model needs a row for the largest
        self.end_of_text = _find_end(vocabulary, name, end_of_text)

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode([int(token) for token in ids], skip_special_tokens=True))

    def encode_many(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        decoded = [text.decode(errors="replace") for text in texts]
        encodings = self._tokenizer.encode_batch_fast(decoded, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def byte_lengths(self) -> np.ndarray | None:
        spec = json.loads(self._content)
        if (spec.get("decoder") or {}).get("type") != "ByteLevel":
            return None  # only byte-level tokens always stand for the same bytes
        lengths = np.zeros(self.vocab_size, dtype=np.int64)
        for token, number in spec["model"]["vocab"].items():
            lengths[number] = len(token)  # byte-level vocabularies write one character per byte
        for added in spec.get("added_tokens", []):
            number = self._tokenizer.token_to_id(added["content"])
            lengths[number] = 0 if added["special"] else len(added["content"].encode())
        return lengths

    def to_json(self) -> bytes | None:
        return self._content


def load_tokenizer(name: str, end_of_text: str | None = None) -> Tokenizer:
    """The tokenizer that `name` means, with `end_of_text` as in `JsonTokenizer`.

    `name` is "bytes", a tokenizer.json (also .gz, .xz or .zst), a folder that has one, or a name on the Hugging Face
    Hub.
    """
    if name == "bytes":
        if end_of_text is not None:
            raise ValueError(f"the bytes tokenizer has token 256 for that; leave out --end-of-text {end_of_text}")
        return ByteTokenizer()
    path = Path(name)
    if path.is_dir():
        path = path / "tokenizer.json"
    if path.is_file():
        with open_text(path) as (stream, _):
            content = stream.read(TOKENIZER_BYTES + 1)
        if len(content) > TOKENIZER_BYTES:
            raise ValueError(f"{path} has more than {TOKENIZER_BYTES:,} bytes; give a tokenizer.json")
        return JsonTokenizer(content, path.name, end_of_text)
    if path.suffix in (".json", ".xz", ".gz", ".zst") or path.is_absolute() or name.startswith("."):
        raise ValueError(f"there is no tokenizer file {path}; give a tokenizer.json, a name on the Hub, or bytes")
    return JsonTokenizer(_download(name), name, end_of_text)


def restore_tokenizer(content: bytes | None, name: str, end_of_text: int | None) -> Tokenizer:
    """The tokenizer of a prepared folder, from its tokenizer.json (None: bytes) and the id of its end-of-text token."""
    if content is None:
        return ByteTokenizer()
    tokenizer = JsonTokenizer(content, name)
    tokenizer.end_of_text = end_of_text
    return tokenizer


def vocabulary_digest(content: bytes | None) -> str:
    """A digest of the vocabulary in a tokenizer.json (None: bytes).

    It is equal for two files in which each id means the same token, however they are formatted.
    """
    if content is None:
        return sha256_bytes(ByteTokenizer.name.encode())
    spec = json.loads(content)
    added = sorted((token["id"], token["content"]) for token in spec.get("added_tokens") or [])
    return sha256_bytes(json.dumps([spec["model"].get("vocab"), added], sort_keys=True).encode())


def _engine_class(name: str) -> Any:
    try:
        from tokenizers import Tokenizer as Engine
    except ImportError as error:
        raise ImportError(
            f"tokenizer {name} needs the tokenizers library: pip install 'rebased[data]', or use --tokenizer bytes"
        ) from error
    return Engine


def _load(content: bytes, name: str) -> Any:
    engine_class = _engine_class(name)
    try:
        engine = engine_class.from_str(content.decode())
    except Exception as error:  # the library raises bare Exception for what it cannot read
        raise ValueError(f"{name} is not a tokenizer.json: {str(error)[:200]}") from error
    engine.no_truncation()
    engine.no_padding()
    engine.encode_special_tokens = True  # "<|endoftext|>" in a text is 13 ordinary characters
    return engine


def _download(name: str) -> bytes:
    engine_class = _engine_class(name)
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)  # the library logs every attempt; one message at the end is enough
    try:
        content: str = engine_class.from_pretrained(name).to_str()
        return content.encode()
    except Exception as error:  # the library raises bare Exception for every network error
        raise ValueError(
            f"tokenizer {name!r} is not a file here and could not be downloaded from the Hugging Face Hub "
            f"({str(error).partition('. ')[0][:200]}); check the name and the network, or give a tokenizer.json"
        ) from error
    finally:
        logging.disable(disabled)


def _find_end(vocabulary: dict[str, int], name: str, wanted: str | None) -> int | None:
    if wanted == "":
        return None
    if wanted is not None:
        if wanted not in vocabulary:
            raise ValueError(f"tokenizer {name} has no token {wanted!r}; give one that it has as --end-of-text")
        return vocabulary[wanted]
    return next((vocabulary[end] for end in END_NAMES if end in vocabulary), None)
