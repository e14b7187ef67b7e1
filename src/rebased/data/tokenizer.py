"""Text to token numbers and back: bytes, or any tokenizer.json."""

import hashlib
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from rebased.data.fast_bpe import WordEncoder
from rebased.data.sources import open_text

END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]", "<|im_end|>")
"""What tokenizers call the token that ends a document, tried in this order."""


class Tokenizer(Protocol):
    name: str
    vocab_size: int
    end_of_text: int | None

    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: Sequence[int]) -> str: ...
    def encode_many(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """UTF-8 to ids, each text by itself; what is not UTF-8 counts as the replacement character."""
        ...

    def byte_lengths(self) -> np.ndarray | None:
        """[vocab_size] How many bytes of text each token stands for; None if that depends on its neighbours."""
        ...

    def to_json(self) -> bytes | None:
        """What tokenizer.json holds; None if there is nothing to keep."""
        ...


class ByteTokenizer:
    """A token a byte, 0 to 255, and 256 after each document. It needs no file and can say anything."""

    name = "bytes"
    vocab_size = 257
    end_of_text: int | None = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        """Documents' ends are left out; a character cut in two becomes the replacement character."""
        return bytes(token for token in map(int, ids) if token < 256).decode(errors="replace")

    def encode_many(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        return [np.frombuffer(text, dtype=np.uint8) for text in texts]

    def byte_lengths(self) -> np.ndarray | None:
        return np.array([1] * 256 + [0])

    def to_json(self) -> bytes | None:
        return None


class JsonTokenizer:
    """A tokenizer.json, run by the `tokenizers` library. Special tokens in a text are read as the text they are."""

    def __init__(self, content: bytes, name: str, end_of_text: str | None = None) -> None:
        self._content = content
        self._tokenizer = _load(content, name)
        self._words = _exact_words(json.loads(content), self._tokenizer)
        self.name = name
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise ValueError(f"the vocabulary of tokenizer {name} is empty")
        self.vocab_size = max(vocabulary.values()) + 1  # numbers may have gaps; a model needs a row for the largest
        self.end_of_text = _find_end(vocabulary, name, end_of_text)

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode([int(token) for token in ids], skip_special_tokens=True))

    def encode_many(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        decoded = [text.decode(errors="replace") for text in texts]
        if self._words is not None and (found := self._words.encode(decoded)) is not None:
            return found
        encodings = self._tokenizer.encode_batch_fast(decoded, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def byte_lengths(self) -> np.ndarray | None:
        spec = json.loads(self._content)
        if (spec.get("decoder") or {}).get("type") != "ByteLevel":
            return None
        lengths = np.zeros(self.vocab_size, dtype=np.int64)
        for token, number in spec["model"]["vocab"].items():
            lengths[number] = len(token)  # a character a byte
        for added in spec.get("added_tokens", []):
            number = self._tokenizer.token_to_id(added["content"])
            lengths[number] = 0 if added["special"] else len(added["content"].encode())
        return lengths

    def to_json(self) -> bytes | None:
        return self._content


def load_tokenizer(name: str, end_of_text: str | None = None) -> Tokenizer:
    """`bytes`, a tokenizer.json (also .gz, .xz or .zst), a folder that has one, or a name on the Hugging Face Hub."""
    if name == "bytes":
        if end_of_text is not None:
            raise ValueError(f"the bytes tokenizer has token 256 for that; leave out --end-of-text {end_of_text}")
        return ByteTokenizer()
    path = Path(name)
    if path.is_dir():
        path = path / "tokenizer.json"
    if path.is_file():
        with open_text(path) as (stream, _):
            content = stream.read()
        return JsonTokenizer(content, path.name, end_of_text)
    if path.suffix in (".json", ".xz", ".gz", ".zst") or path.is_absolute() or name.startswith("."):
        raise ValueError(f"there is no tokenizer file {path}; give a tokenizer.json, a name on the Hub, or bytes")
    return JsonTokenizer(_download(name), name, end_of_text)


def restore_tokenizer(content: bytes | None, name: str, end_of_text: int | None) -> Tokenizer:
    """The tokenizer of a prepared folder, from what is kept there: no network."""
    if content is None:
        return ByteTokenizer()
    tokenizer = JsonTokenizer(content, name)
    tokenizer.end_of_text = end_of_text
    return tokenizer


def vocabulary_digest(content: bytes | None) -> str:
    """Equal for two tokenizers, None being bytes, whose numbers stand for the same tokens, however they are written."""
    if content is None:
        return digest(ByteTokenizer.name.encode())
    spec = json.loads(content)
    added = sorted((token["id"], token["content"]) for token in spec.get("added_tokens") or [])
    return digest(json.dumps([spec["model"].get("vocab"), added], sort_keys=True).encode())


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _load(content: bytes, name: str) -> Any:
    try:
        from tokenizers import Tokenizer as Engine
    except ImportError as error:
        raise ImportError(
            f"tokenizer {name} needs the tokenizers library: pip install 'rebased[data]', or use --tokenizer bytes"
        ) from error
    try:
        engine = Engine.from_str(content.decode())
    except Exception as error:  # the library raises bare Exception for what it cannot read
        raise ValueError(f"{name} is not a tokenizer.json: {str(error)[:200]}") from error
    engine.no_truncation()
    engine.no_padding()
    engine.encode_special_tokens = True  # "<|endoftext|>" in a text is thirteen characters
    return engine


PROBE = (
    "It's we'll THEY'RE x'd ''s 'tis don't  two   three\n\n  indented\t\ttabs \n mixed \r\n 3.14 2024-01-01 a1b2 "
    "naïve cafe\u0301 Ωmega 漢字かな 한국어 \u1112\u1161\u11ab ２ ² Ⅷ \u00a0nbsp\u3000wide\u2003em "
    "\U0001f600👩\u200d🔬 _x__ $%^ <|endoftext|> "
    "https://example.org/?q=1&r=two#three {'key': [1, 2]} ==Heading== [[Link|text]] -- … “quoted” "
    + " " * 40
    + "end  \n "
)


def _exact_words(spec: dict[str, Any], engine: Any) -> WordEncoder | None:
    """The fast way, if it gives what the library gives for a text with all that is difficult in it."""
    words = WordEncoder.of(spec, engine)
    if words is not None:
        found = words.encode([PROBE])
        if found is None or found[0].tolist() != engine.encode(PROBE, add_special_tokens=False).ids:
            return None
    return words


def _download(name: str) -> bytes:
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)  # the library tells of every try; one message in the end is enough
    try:
        from tokenizers import Tokenizer as Engine

        return Engine.from_pretrained(name).to_str().encode()
    except ImportError as error:
        raise ImportError(f"tokenizer {name} needs the tokenizers library: pip install 'rebased[data]'") from error
    except Exception as error:  # the library raises bare Exception for all that can go wrong on a network
        raise ValueError(
            f"tokenizer {name!r} is no file here and could not be had from the Hugging Face Hub "
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
