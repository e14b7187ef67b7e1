"""Text of tokens that come one by one: equal to the text of all of them, with no broken character; stop strings."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.small_tokenizer import TEXT, small_tokenizer_json
from rebased.data.detokenize import Detokenizer, StopStrings
from rebased.data.tokenizer import ByteTokenizer, JsonTokenizer, Tokenizer


def pieces(tokenizer: Tokenizer, tokens: list[int]) -> list[str]:
    stream = Detokenizer(tokenizer)
    return [*(stream.push(token) for token in tokens), stream.finish()]


@given(st.lists(st.integers(0, 256), max_size=40))
@settings(max_examples=200, deadline=None)
def test_any_bytes_give_the_text_of_all_of_them(tokens: list[int]) -> None:
    assert "".join(pieces(ByteTokenizer(), tokens)) == ByteTokenizer().decode(tokens)


def test_characters_are_held_until_they_are_whole() -> None:
    tokens = ByteTokenizer().encode("aé€😀")
    assert pieces(ByteTokenizer(), tokens) == ["a", "", "é", "", "", "€", "", "", "", "😀", ""]
    assert pieces(ByteTokenizer(), tokens[:-1])[-1] == "\ufffd"


@given(st.lists(st.integers(0, 399), max_size=30))
@settings(max_examples=50, deadline=None)
def test_any_tokens_of_a_vocabulary_give_the_text_of_all_of_them(tokens: list[int]) -> None:
    tokenizer = JsonTokenizer(small_tokenizer_json(), "small")
    assert "".join(pieces(tokenizer, tokens)) == tokenizer.decode(tokens)


def test_text_of_a_vocabulary_comes_without_broken_characters() -> None:
    tokenizer = JsonTokenizer(small_tokenizer_json(), "small")
    for text in (*TEXT, "😀 → 漢字"):
        found = pieces(tokenizer, tokenizer.encode(text))
        assert "".join(found) == text
        assert not any("\ufffd" in piece for piece in found)


def test_tokens_that_are_no_text_are_not_held_for_ever() -> None:
    tokenizer = JsonTokenizer(small_tokenizer_json(), "small")
    half, _ = tokenizer.encode("ñ")  # one token per byte
    assert any(piece for piece in pieces(tokenizer, [half] * 40)[:-1])


def passed(text: str, stops: list[str]) -> tuple[list[str], str | None]:
    """What is passed on of a text that comes character by character."""
    stream = StopStrings(stops)
    found = [stream.push(character) for character in text]
    return [*found, stream.finish()], stream.found


def test_a_stop_string_ends_the_text_before_it() -> None:
    found, stop = passed("one\n\ntwo", ["\n\n"])
    assert ("".join(found), stop) == ("one", "\n\n")
    found, stop = passed("one\ntwo", ["\n\n"])
    assert ("".join(found), stop) == ("one\ntwo", None)
    assert found[3:5] == ["", "\nt"]  # a line break is held until the next character decides
    assert "".join(passed("abcabd", ["abd"])[0]) == "abc"
    assert "".join(passed("aab", ["aaa", "ab"])[0]) == "a"
    assert "".join(passed("xend", ["never", "end", "d"])[0]) == "x"
    assert "".join(passed("ends with a beginning: en", ["end!"])[0]) == "ends with a beginning: en"


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
@settings(max_examples=200, deadline=None)
def test_stops_are_where_the_whole_text_first_has_one(text: str, stops: list[str]) -> None:
    """Character by character: the first stop string to be complete counts."""
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    found, stop = passed(text, stops)
    if not ends:
        assert ("".join(found), stop) == (text, None)
        return
    complete = text[: min(ends)]
    longest = max((each for each in stops if complete.endswith(each)), key=len)
    assert "".join(found) == complete[: len(complete) - len(longest)]


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="a stop string is empty"):
        StopStrings(["a", ""])
