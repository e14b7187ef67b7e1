"""The fast encoder against the library, token for token; parts against wholes; normal form C against Python's."""

import io
import json
import lzma
import os
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizer import changed_tokenizer_json, small_tokenizer_json
from tokenizers import Tokenizer

from rebased.data import fast_bpe as words_module
from rebased.data.encode_chunks import character_start, divide, read_parts
from rebased.data.fast_bpe import WordEncoder
from rebased.data.nfc import normalise
from rebased.data.tokenizer import JsonTokenizer, load_tokenizer

DATA = Path(os.environ.get("REBASED_DATA", Path(__file__).parents[3].parent / "shared" / "data"))

# Everything the rules ask about: letters, digits, spaces of several kinds, quotes before endings, marks that combine.
TRICKY = st.text(
    st.sampled_from("aest'lrvmd'S 0½²  \n\t\r\u00a0\u2003\x1c\x85éß漢.,!-_\u0301\u0308\u1161ᄒ한\U0001f600"),
    max_size=60,
)


def library(content: bytes) -> Tokenizer:
    tokenizer = Tokenizer.from_str(content.decode())
    tokenizer.encode_special_tokens = True
    return tokenizer


@pytest.mark.parametrize(("normalize", "spaces"), [(True, True), (False, False)])
def test_tricky_texts_are_the_librarys(normalize: bool, spaces: bool) -> None:
    content = small_tokenizer_json(normalize=normalize, spaces=spaces)
    engine, words = library(content), WordEncoder.of(json.loads(content), library(content))
    assert words is not None

    @settings(deadline=None, max_examples=150)
    @given(st.lists(TRICKY, max_size=4))
    def check(texts: list[str]) -> None:
        found = words.encode(texts)
        assert found is not None
        assert [ids.tolist() for ids in found] == [engine.encode(text, add_special_tokens=False).ids for text in texts]

    check()


def test_what_is_forgotten_is_learnt_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words_module, "MOST_WORDS", 3)
    content = small_tokenizer_json()
    engine, words = library(content), WordEncoder.of(json.loads(content), library(content))
    assert words is not None
    for text in ("the first line", "a second one, longer", "the first line", "averyveryverylongwordthatfitsnoslot the"):
        (found,) = words.encode([text]) or ()
        assert found.tolist() == engine.encode(text).ids


def test_words_that_share_a_slot_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words_module, "SLOTS", 1)
    content = small_tokenizer_json()
    engine, words = library(content), WordEncoder.of(json.loads(content), library(content))
    assert words is not None
    text = " ".join(f"w{n}x" for n in range(300)) + " a b c a b c"
    for _ in range(2):
        (found,) = words.encode([text]) or ()
        assert found.tolist() == engine.encode(text).ids


@pytest.mark.parametrize(
    "changes",
    [
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}},
        {"normalizer": {"type": "Lowercase"}},
    ],
)
def test_other_rules_are_left_to_the_library(changes: dict[str, object]) -> None:
    content = changed_tokenizer_json(**changes)
    assert WordEncoder.of(json.loads(content), library(content)) is None
    text = "It's  THE first\n line"
    (found,) = JsonTokenizer(content, "changed").encode_many([text.encode()])
    assert found.tolist() == library(content).encode(text).ids


def test_a_character_without_a_name_is_left_to_the_library() -> None:
    content = small_tokenizer_json()
    words = WordEncoder.of(json.loads(content), library(content))
    assert words is not None
    assert words.encode(["a\U0005ffff b"]) is None
    (found,) = JsonTokenizer(content, "small").encode_many(["a\U0005ffff b".encode()])
    assert found.tolist() == library(content).encode("a\U0005ffff b").ids


def test_special_tokens_in_a_text_are_text() -> None:
    tokenizer = JsonTokenizer(small_tokenizer_json(), "small")
    assert tokenizer.end_of_text == 0
    assert 0 not in tokenizer.encode("a<|endoftext|>b")
    assert 0 not in tokenizer.encode_many([b"a<|endoftext|>b"])[0]
    assert tokenizer.decode(tokenizer.encode("a<|endoftext|>b")) == "a<|endoftext|>b"


def test_byte_lengths_add_up() -> None:
    tokenizer = JsonTokenizer(small_tokenizer_json(), "small")
    text = "naïve   café, 漢字\n    the end"
    lengths = tokenizer.byte_lengths()
    assert lengths is not None
    assert lengths[tokenizer.encode(text)].sum() == len(text.encode())
    assert lengths[0] == 0


@settings(deadline=None)
@given(st.text(st.sampled_from("ae\n\u0301\u0327\u1112\u1161\u11ab한漢\u0958\u2126Ω\u09c7\u09be"), max_size=40))
def test_normal_form_c(text: str) -> None:
    assert normalise(text) == unicodedata.normalize("NFC", text)


LINES = st.text(st.sampled_from("ab.é漢 \n\t"), max_size=200)


@settings(deadline=None, max_examples=60)
@given(LINES, st.integers(8, 40))
def test_parts_are_the_whole_and_never_cut_a_character(text: str, size: int) -> None:
    parts = list(read_parts(io.BytesIO(text.encode()), size))
    assert b"".join(parts) == text.encode()
    assert "".join(part.decode() for part in parts) == text
    assert max(map(len, parts), default=0) <= size


@settings(deadline=None, max_examples=60)
@given(st.lists(st.sampled_from(["word", "it's", "two  spaces", "x\n\ny", "12.5", "    indented", "é"]), max_size=60))
def test_parts_encode_as_the_whole_does(pieces: list[str]) -> None:
    text = "".join(f"{piece}.\nNext line, " for piece in pieces)
    engine = library(small_tokenizer_json())
    parts = [part.decode() for part in read_parts(io.BytesIO(text.encode()), 60)]
    ids = [token for part in parts for token in engine.encode(part).ids]
    assert ids == engine.encode(text).ids


@settings(deadline=None)
@given(st.text(max_size=30), st.lists(st.integers(0, 90), max_size=3), st.integers(4, 9))
def test_divide(text: str, cuts: list[int], size: int) -> None:
    data, cuts = text.encode(), sorted(cuts)
    found = list(divide(read_parts(io.BytesIO(data), size), cuts, 1))
    assert b"".join(part for _, part, _ in found) == data
    for stretch in {stretch for stretch, _, _ in found}:
        parts = [(part, is_end) for at, part, is_end in found if at == stretch]
        assert [is_end for _, is_end in parts] == [False] * (len(parts) - 1) + [True]
        begin, end = ([0, *cuts][stretch], [*cuts, len(data)][stretch])
        begin, end = (character_start(data, min(at, len(data))) for at in (begin, end))
        assert b"".join(part for part, _ in parts) == data[begin:end]


def test_divide_keeps_whole_tokens() -> None:
    tokens = np.arange(10, dtype="<u2").tobytes()
    found = list(divide([tokens[:12], tokens[12:]], [5, 14], 2))
    assert [(at, len(part), is_end) for at, part, is_end in found] == [
        (0, 4, True),
        (1, 8, False),
        (1, 2, True),
        (2, 6, True),
    ]


@pytest.mark.skipif(not DATA.is_dir(), reason="needs shared/data beside the repository, or REBASED_DATA")
def test_neox_on_wikipedia() -> None:
    path = DATA / "gpt-neox-20b.20B_tokenizer.json.xz"
    tokenizer = load_tokenizer(str(path))
    assert tokenizer.vocab_size == 50277
    assert tokenizer.end_of_text == 0
    with lzma.open(DATA / "enwik8.xz") as file:
        file.seek(1_000_000)
        text = file.read(300_000).decode(errors="replace")
    assert isinstance(tokenizer, JsonTokenizer)
    assert tokenizer._words is not None
    (found,) = tokenizer.encode_many([text.encode()])
    assert found.tolist() == library(lzma.decompress(path.read_bytes())).encode(text).ids
