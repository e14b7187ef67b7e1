"""The fast encoder gives the library's token ids, and NFC is Python's."""

import json
import lzma
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizer import changed_tokenizer_json, small_tokenizer_json
from tokenizers import Tokenizer

from real_data import real_data
from rebased.data import fast_bpe as words_module
from rebased.data.fast_bpe import WordEncoder
from rebased.data.nfc import normalise
from rebased.data.tokenizer import JsonTokenizer, load_tokenizer

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


def test_neox_on_wikipedia() -> None:
    path = real_data("gpt-neox-20b.20B_tokenizer.json.xz")
    tokenizer = load_tokenizer(str(path))
    assert tokenizer.vocab_size == 50277
    assert tokenizer.end_of_text == 0
    with lzma.open(real_data("enwik8.xz")) as file:
        file.seek(1_000_000)
        text = file.read(300_000).decode(errors="replace")
    assert isinstance(tokenizer, JsonTokenizer)
    assert tokenizer._words is not None
    (found,) = tokenizer.encode_many([text.encode()])
    assert found.tolist() == library(lzma.decompress(path.read_bytes())).encode(text).ids
