"""Byte-level BPE, several times as fast as the `tokenizers` library alone.

numpy splits a text into words, and the library encodes each distinct word once. Nineteen of twenty words have been seen
before and are looked up, short ones without becoming Python objects. The token ids are the library's: where that is not
certain (another pre-tokenizer, unknown characters), `of` or `encode` returns None.
"""

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from rebased.data.nfc import normalise
from rebased.data.pretokens import word_starts

MOST_WORDS = 2**20  # in the cache, about 200 MB; then it is emptied
SLOTS = 18  # bits: the table of short words has 2**18 slots, 5 MB
SHORT = 15  # bytes of a short word, at most
MASKS = np.array([(1 << (8 * size)) - 1 for size in range(9)], dtype=np.uint64)  # keep the first 0 to 8 of eight bytes


def _byte_characters() -> dict[int, int]:
    """{byte: character} of byte-level vocabularies: a printable byte is itself, the others follow from 256 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = (byte for byte in range(256) if byte not in printable)
    return {byte: byte for byte in printable} | {byte: 256 + i for i, byte in enumerate(others)}


BYTE_CHARACTERS = _byte_characters()


class WordEncoder:
    """A cache of the tokens of words, in front of a BPE model of the `tokenizers` library.

    `added` are the added tokens that are not special, {content: id}. With `normalise` texts are brought to NFC first.
    """

    def __init__(self, model: Any, added: dict[str, int], normalise: bool) -> None:
        self._tokenize, self._normalise = model.tokenize, normalise
        self._added = {content.encode(): number for content, number in added.items()}
        longest_first = sorted(added, key=len, reverse=True)
        self._find_added = re.compile("|".join(map(re.escape, longest_first))) if added else None
        self._number: dict[bytes, int]
        self._first: np.ndarray  # [words] where the tokens of each word begin in _flat
        self._lengths: np.ndarray  # [words] how many tokens each word has
        self._flat: np.ndarray  # [tokens]
        self._forget()

    @classmethod
    def of(cls, spec: dict[str, Any], engine: Any) -> "WordEncoder | None":
        """The encoder for the content of a tokenizer.json, loaded by the library as `engine`.

        None if its rules are not known here; those of GPT-2 and GPT-NeoX are.
        """
        pre, model, normalizer = spec.get("pre_tokenizer") or {}, spec["model"], spec.get("normalizer")
        added = [token for token in spec.get("added_tokens", []) if not token["special"]]
        known = (
            pre.get("type") == "ByteLevel"
            and not pre.get("add_prefix_space")
            and pre.get("use_regex", True)
            and model.get("type") == "BPE"
            and not model.get("dropout")
            and (normalizer is None or normalizer.get("type") == "NFC")
            and not any(token["lstrip"] or token["rstrip"] or token["single_word"] for token in added)
        )
        if not known:
            return None
        numbers = {token["content"]: engine.token_to_id(token["content"]) for token in added}
        return cls(engine.model, numbers, normalizer is not None)

    def encode(self, texts: Sequence[str]) -> list[np.ndarray] | None:
        """The tokens of each text, [n] uint32; None if the library has to encode them."""
        if len(self._number) > MOST_WORDS:
            self._forget()
        if self._normalise:
            texts = [normalise(text) for text in texts]
        text = "".join(texts)
        if not text:
            return [np.empty(0, dtype=np.uint32) for _ in texts]
        codes = np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
        text_cuts = np.cumsum([0, *map(len, texts)])
        spans = self._added_spans(texts, text_cuts)  # [m,2]
        starts = word_starts(codes, np.concatenate([text_cuts, spans.ravel()]))
        if starts is None:
            return None
        if len(spans):  # an added token is one word
            inside = np.searchsorted(spans[:, 0], starts, side="right") - 1
            starts = starts[(inside < 0) | (starts == spans[inside, 0]) | (starts >= spans[inside, 1])]
        data = text.encode()
        if len(data) != len(text):  # positions of characters -> positions of bytes
            sizes = np.ones(len(codes), dtype=np.int64)
            for least in (0x80, 0x800, 0x10000):
                sizes += codes >= least
            places = np.cumsum(sizes) - sizes
            byte_starts = places[starts]
        else:
            byte_starts = starts
        lengths, first = self._look_up(data, byte_starts)
        ends = np.cumsum(lengths)
        tokens = self._flat[np.repeat(first - ends + lengths, lengths) + np.arange(ends[-1])]
        # A text begins with a word, so its tokens begin where the tokens of that word do.
        at = np.searchsorted(starts, text_cuts)
        token_cuts = np.concatenate([ends - lengths, ends[-1:]])[at]
        return [tokens[a:b] for a, b in pairwise(token_cuts.tolist())]

    def _added_spans(self, texts: Sequence[str], cuts: np.ndarray) -> np.ndarray:
        if self._find_added is None:
            return np.empty((0, 2), dtype=np.int64)
        spans = [
            (match.start() + cut, match.end() + cut)
            for text, cut in zip(texts, cuts.tolist(), strict=False)
            for match in self._find_added.finditer(text)
        ]
        return np.array(spans, dtype=np.int64).reshape(-1, 2)

    def _look_up(self, data: bytes, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(how many tokens, where they begin in _flat) for each word of `data`; words begin at `starts`."""
        ends = np.append(starts[1:], len(data))
        sizes = ends - starts
        padded = data + bytes(16)
        eights = np.ndarray((len(data) + 9,), dtype="<u8", buffer=padded, strides=(1,))  # 8 bytes from each byte on
        # Two integers identify a word of up to 15 bytes: they hold its bytes, and the last byte holds its size.
        low = eights[starts] & MASKS[np.minimum(sizes, 8)]
        high = eights[starts + 8 * (sizes > 8)] & MASKS[np.clip(sizes - 8, 0, 7)] | (sizes.astype(np.uint64) << 56)
        slots = ((low * 0x9E3779B97F4A7C15 ^ high * 0xC2B2AE3D27D4EB4F) * 0xFF51AFD7ED558CCD) >> (64 - SLOTS)
        known = (self._low[slots] == low) & (self._high[slots] == high) & (sizes <= SHORT)
        numbers = self._slot_number[slots]
        rest = np.flatnonzero(~known)
        if len(rest):
            words = [data[a:b] for a, b in zip(starts[rest].tolist(), ends[rest].tolist(), strict=True)]
            numbers[rest] = self._numbers_of(words)
            short = rest[sizes[rest] <= SHORT]
            self._low[slots[short]], self._high[slots[short]] = low[short], high[short]
            self._slot_number[slots[short]] = numbers[short]
        return self._lengths[numbers], self._first[numbers]

    def _numbers_of(self, words: list[bytes]) -> list[int]:
        numbers = list(map(self._number.get, words))
        new = [i for i, number in enumerate(numbers) if number is None]
        if new:
            self._learn(list(dict.fromkeys(words[i] for i in new)))
            for i in new:
                numbers[i] = self._number[words[i]]
        return numbers  # type: ignore[return-value]

    def _learn(self, words: list[bytes]) -> None:
        flat: list[int] = []
        lengths = np.empty(len(words), dtype=np.int64)
        for i, word in enumerate(words):
            before = len(flat)
            if word in self._added:
                flat.append(self._added[word])
            else:
                flat += [token.id for token in self._tokenize(word.decode("latin-1").translate(BYTE_CHARACTERS))]
            lengths[i] = len(flat) - before
        first = len(self._flat) + np.cumsum(lengths) - lengths
        self._number.update(zip(words, range(len(self._first), len(self._first) + len(words)), strict=True))
        self._first = np.concatenate([self._first, first])
        self._lengths = np.concatenate([self._lengths, lengths])
        self._flat = np.concatenate([self._flat, np.array(flat, dtype=np.uint32)])

    def _forget(self) -> None:
        self._number = {}
        self._first = np.empty(0, dtype=np.int64)
        self._lengths = np.empty(0, dtype=np.int64)
        self._flat = np.empty(0, dtype=np.uint32)
        self._low = np.zeros(2**SLOTS, dtype=np.uint64)
        self._high = np.zeros(2**SLOTS, dtype=np.uint64)  # no word has size 0
        self._slot_number = np.zeros(2**SLOTS, dtype=np.int64)
