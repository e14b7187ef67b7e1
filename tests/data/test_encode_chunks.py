"""Chunks of a text: together they are the text, they encode as it does, and they end where a split does."""

import io

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizer import small_tokenizer_json
from tokenizers import Tokenizer

from rebased.data.encode_chunks import character_start, divide, read_chunks

LINES = st.text(st.sampled_from("ab.é漢 \n\t"), max_size=200)


@settings(deadline=None, max_examples=60)
@given(LINES, st.integers(8, 40))
def test_chunks_are_the_whole_and_never_cut_a_character(text: str, size: int) -> None:
    chunks = list(read_chunks(io.BytesIO(text.encode()), size))
    assert b"".join(chunks) == text.encode()
    assert "".join(chunk.decode() for chunk in chunks) == text
    assert max(map(len, chunks), default=0) <= size


@settings(deadline=None, max_examples=60)
@given(st.lists(st.sampled_from(["word", "it's", "two  spaces", "x\n\ny", "12.5", "    indented", "é"]), max_size=60))
def test_chunks_encode_as_the_whole_does(words: list[str]) -> None:
    text = "".join(f"{word}.\nNext line, " for word in words)
    engine = Tokenizer.from_str(small_tokenizer_json().decode())
    chunks = [chunk.decode() for chunk in read_chunks(io.BytesIO(text.encode()), 60)]
    ids = [token for chunk in chunks for token in engine.encode(chunk).ids]
    assert ids == engine.encode(text).ids


@settings(deadline=None)
@given(st.text(max_size=30), st.lists(st.integers(0, 90), max_size=3), st.integers(4, 9))
def test_divide(text: str, cuts: list[int], size: int) -> None:
    data, cuts = text.encode(), sorted(cuts)
    found = list(divide(read_chunks(io.BytesIO(data), size), cuts, 1))
    assert b"".join(chunk for _, chunk, _ in found) == data
    for index in {index for index, _, _ in found}:
        chunks = [(chunk, is_last) for at, chunk, is_last in found if at == index]
        assert [is_last for _, is_last in chunks] == [False] * (len(chunks) - 1) + [True]
        begin, end = ([0, *cuts][index], [*cuts, len(data)][index])
        begin, end = (character_start(data, min(at, len(data))) for at in (begin, end))
        assert b"".join(chunk for chunk, _ in chunks) == data[begin:end]


def test_divide_keeps_whole_tokens() -> None:
    tokens = np.arange(10, dtype="<u2").tobytes()
    found = list(divide([tokens[:12], tokens[12:]], [5, 14], 2))
    assert [(index, len(chunk), is_last) for index, chunk, is_last in found] == [
        (0, 4, True),
        (1, 8, False),
        (1, 2, True),
        (2, 6, True),
    ]
