"""Token ids are those of the `tokenizers` library, whether tiktoken encodes or not."""

import json
import lzma
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizer import changed_tokenizer_json, small_tokenizer_json
from tokenizers import Tokenizer

from real_data import real_data
from rebased.data.tiktoken_bpe import TiktokenEncoder, find_ranks, make_tiktoken_encoder
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


def tiktoken_encoder(content: bytes) -> TiktokenEncoder:
    pytest.importorskip("tiktoken")
    encoder = make_tiktoken_encoder(content, library(content))
    assert encoder is not None
    return encoder


@pytest.mark.parametrize(("normalize", "spaces"), [(True, True), (False, False)])
def test_tricky_texts_are_the_librarys(normalize: bool, spaces: bool) -> None:
    content = small_tokenizer_json(normalize=normalize, spaces=spaces)
    engine, encoder = library(content), tiktoken_encoder(content)

    @settings(deadline=None, max_examples=300)
    @given(st.lists(TRICKY, max_size=4))
    def check(texts: list[str]) -> None:
        found = encoder.encode(texts)
        assert found is not None
        assert [ids.tolist() for ids in found] == [engine.encode(text, add_special_tokens=False).ids for text in texts]

    check()


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
    assert make_tiktoken_encoder(content, library(content)) is None
    text = "It's  THE first\n line"
    (found,) = JsonTokenizer(content, "changed").encode_many([text.encode()])
    assert found.tolist() == library(content).encode(text).ids


def test_ids_that_are_not_in_the_order_of_merges_are_left_to_the_library() -> None:
    """tiktoken would merge in the order of ids, the library merges in the order of its list."""
    spec = json.loads(small_tokenizer_json())
    vocab, (first, second) = spec["model"]["vocab"], ("".join(merge) for merge in spec["model"]["merges"][:2])
    vocab[first], vocab[second] = vocab[second], vocab[first]
    content = json.dumps(spec).encode()
    assert find_ranks(spec["model"], library(content)) is None
    assert make_tiktoken_encoder(content, library(content)) is None


def test_a_byte_without_a_token_is_left_to_the_library() -> None:
    spec = json.loads(small_tokenizer_json())
    del spec["model"]["vocab"]["ô"]  # byte 0xF4, which no merge has
    assert find_ranks(spec["model"], library(json.dumps(spec).encode())) is None


def test_a_token_that_no_merge_makes_has_no_rank() -> None:
    spec = json.loads(small_tokenizer_json())
    spec["model"]["vocab"]["qqq"] = 399_999
    content = json.dumps(spec).encode()
    ranks = find_ranks(spec["model"], library(content))
    assert ranks is not None
    assert b"qqq" not in ranks
    (found,) = tiktoken_encoder(content).encode(["a qqq b"]) or ()
    assert found.tolist() == library(content).encode("a qqq b").ids


@pytest.mark.parametrize("text", ["a\U0005ffff b", "a" + " " * 50_000 + "b"], ids=["unassigned", "long space"])
def test_texts_that_are_left_to_the_library(text: str) -> None:
    content = small_tokenizer_json()
    assert tiktoken_encoder(content).encode([text]) is None
    (found,) = JsonTokenizer(content, "small").encode_many([text.encode()])
    assert found.tolist() == library(content).encode(text).ids


def test_without_tiktoken(monkeypatch: pytest.MonkeyPatch) -> None:
    content = small_tokenizer_json()
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    assert make_tiktoken_encoder(content, library(content)) is None
    (found,) = JsonTokenizer(content, "small").encode_many([b"It's the first line"])
    assert found.tolist() == library(content).encode("It's the first line").ids


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


def test_neox_on_wikipedia() -> None:
    path = real_data("gpt-neox-20b.20B_tokenizer.json.xz")
    tokenizer = load_tokenizer(str(path))
    assert tokenizer.vocab_size == 50277
    assert tokenizer.end_of_text == 0
    with lzma.open(real_data("enwik8.xz")) as file:
        file.seek(1_000_000)
        text = file.read(300_000).decode(errors="replace")
    assert isinstance(tokenizer, JsonTokenizer)
    tiktoken_encoder(lzma.decompress(path.read_bytes()))
    (found,) = tokenizer.encode_many([text.encode()])
    assert found.tolist() == library(lzma.decompress(path.read_bytes())).encode(text).ids
