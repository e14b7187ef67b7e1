"""Token ids are those of the `tokenizers` library."""

import lzma

from small_tokenizer import small_tokenizer_json
from tokenizers import Tokenizer

from real_data import real_data
from rebased.data.tokenizer import JsonTokenizer, load_tokenizer


def library(content: bytes) -> Tokenizer:
    tokenizer = Tokenizer.from_str(content.decode())
    tokenizer.encode_special_tokens = True
    return tokenizer


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
    (found,) = tokenizer.encode_many([text.encode()])
    assert found.tolist() == library(lzma.decompress(path.read_bytes())).encode(text).ids
