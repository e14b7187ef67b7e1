"""Byte-level BPE by the `tiktoken` library: several times as fast as `tokenizers`, with the same token ids."""

import json
import re
import unicodedata
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LONG_SPACE = 5000  # characters of white space; tiktoken's regular expressions overflow their stack on a million
UTF8_BYTES = (*range(0xC0), *range(0xC2, 0xF5))  # the others never occur in UTF-8
PROBE = (
    "It's we'll THEY'RE x'd ''s 'tis don't  two   three\n\n  indented\t\ttabs \n mixed \r\n 3.14 2024-01-01 a1b2 "
    "naïve cafe\u0301 Ωmega 漢字かな 한국어 \u1112\u1161\u11ab ２ ² Ⅷ \u00a0nbsp\u3000wide\u2003em "
    "\U0001f600👩\u200d🔬 _x__ $%^ <|endoftext|> "
    "https://example.org/?q=1&r=two#three {'key': [1, 2]} ==Heading== [[Link|text]] -- … “quoted” "
    + " " * 40
    + "end  \n "
)


class TiktokenEncoder:
    """Encodes texts with the vocabulary of a tokenizer.json. Made by `make_tiktoken_encoder`.

    `added` are the added tokens that are not special, {content: id}. With `normalise` texts are brought to NFC first.
    """

    def __init__(self, ranks: dict[bytes, int], added: dict[str, int], normalise: bool) -> None:
        import tiktoken

        encoding = tiktoken.Encoding("tokenizer", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens={})
        self._encode = encoding.encode_ordinary
        self._added, self._normalise = added, normalise
        longest_first = sorted(added, key=len, reverse=True)
        self._split_added = re.compile(f"({'|'.join(map(re.escape, longest_first))})") if added else None

    def encode(self, texts: Sequence[str]) -> list[np.ndarray] | None:
        """The token ids of each text, [n] uint32; None if `tokenizers` has to encode them.

        That is so for characters which are not assigned in Python's version of Unicode: the two libraries may disagree
        about what they are. And for very long white space, which tiktoken cannot match.
        """
        for text in texts:
            if not text.isascii() and any(unicodedata.category(character) == "Cn" for character in set(text)):
                return None
            if any(text[i : i + LONG_SPACE].isspace() for i in range(0, len(text) - LONG_SPACE, LONG_SPACE)):
                return None
        return [np.array(self._encode_one(text), dtype=np.uint32) for text in texts]

    def _encode_one(self, text: str) -> list[int]:
        if self._normalise:
            text = unicodedata.normalize("NFC", text)
        if self._split_added is None:
            return self._encode(text)
        ids: list[int] = []
        for i, piece in enumerate(self._split_added.split(text)):  # text, added token, text, ...
            ids += [self._added[piece]] if i % 2 else self._encode(piece)
        return ids


def make_tiktoken_encoder(content: bytes, engine: Any) -> TiktokenEncoder | None:
    """The encoder for a tokenizer.json, which the `tokenizers` library has loaded as `engine`.

    None if tiktoken is not installed, or is not certain to give the token ids of `tokenizers`. It is for byte-level BPE
    with GPT-2's pre-tokenizer, as in GPT-2 and GPT-NeoX.
    """
    spec = json.loads(content)
    added = [token for token in spec.get("added_tokens", []) if not token["special"]]
    ranks = find_ranks(spec["model"], engine) if _is_known(spec, added) else None
    if ranks is None:
        return None
    ids = {token["content"]: engine.token_to_id(token["content"]) for token in added}
    try:
        encoder = TiktokenEncoder(ranks, ids, spec.get("normalizer") is not None)
    except ImportError:
        return None
    found = encoder.encode([PROBE])
    same = found is not None and found[0].tolist() == engine.encode(PROBE, add_special_tokens=False).ids
    return encoder if same else None


def _is_known(spec: dict[str, Any], added: Sequence[dict[str, Any]]) -> bool:
    """Whether the rules of a tokenizer.json are those that `TiktokenEncoder` follows."""
    pre, model, normalizer = spec.get("pre_tokenizer") or {}, spec["model"], spec.get("normalizer")
    options = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "ignore_merges")
    return (
        pre.get("type") == "ByteLevel"
        and not pre.get("add_prefix_space")
        and pre.get("use_regex", True)
        and model.get("type") == "BPE"
        and not any(model.get(option) for option in options)
        and (normalizer is None or normalizer.get("type") == "NFC")
        and not any(token["lstrip"] or token["rstrip"] or token["single_word"] for token in added)
    )


def find_ranks(model: dict[str, Any], engine: Any) -> dict[bytes, int] | None:
    """{bytes of a token: its id}, if merging by the smallest id is the same as merging by the list of merges.

    tiktoken merges the neighbours whose union has the smallest id, `tokenizers` those that come first in its list. The
    results are equal if ids increase along the list and each token here, encoded by `tokenizers`, is one token: then no
    other two neighbours than those of its merge can ever have it as their union. None if ids do not increase, or a byte
    of UTF-8 has no token.
    """
    vocab = model["vocab"]
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    products = [vocab[left + right] for left, right in merges]
    byte_of = {character: byte for byte, character in enumerate(_byte_characters())}
    ranks = {
        bytes(byte_of[character] for character in token): number
        for token, number in vocab.items()
        if byte_of.keys() >= set(token) and [found.id for found in engine.model.tokenize(token)] == [number]
    }
    complete = all(bytes([byte]) in ranks for byte in UTF8_BYTES)
    return ranks if complete and all(a < b for a, b in pairwise(products)) else None


def _byte_characters() -> str:
    """The 256 characters that stand for bytes in byte-level vocabularies: printable ones for themselves."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return "".join(chr(byte if byte in printable else next(others)) for byte in range(256))
