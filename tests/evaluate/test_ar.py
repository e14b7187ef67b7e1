"""AR tokens end repeated n-grams of a window: compared with a loop over tokens."""

import lzma

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from real_data import real_data
from rebased.data.tokenizer import load_tokenizer
from rebased.evaluate.ar import ARRule, distance_to_previous
from rebased.evaluate.ngrams import NgramCounts, count_ngrams

LETTERS = "abcdefgh."


def read(text: str) -> Tensor:
    return torch.tensor([[LETTERS.index(letter) for letter in text]])


def ar_mask(
    tokens: Tensor,
    order: int = 2,
    reset_token: int | None = None,
    frequency: NgramCounts | None = None,
    max_count: int | None = None,
) -> Tensor:
    return ARRule(order, reset_token, frequency, max_count).distances(tokens) > 0


def targets(text: str, order: int = 2, reset: str | None = None) -> str:
    mask = ar_mask(read(text), order, reset_token=None if reset is None else LETTERS.index(reset))
    return "".join("^" if hit else " " for hit in mask[0])


def by_reading(row: list[int], order: int, reset: int | None) -> list[int]:
    """Distances to the previous occurrence within the document, 0 for none, by a loop over tokens."""
    distances, seen, begins = [], {}, 0
    for t, token in enumerate(row):
        if token == reset:
            seen, begins = {}, t
        ngram = tuple(row[t - order + 1 : t + 1])
        whole = t - order + 1 >= begins
        distances.append(t - seen[ngram] if whole and ngram in seen else 0)
        if whole:
            seen[ngram] = t
    return distances


@pytest.mark.parametrize(
    ("text", "order", "want"),
    [
        ("abab", 2, "   ^"),
        ("aaa", 2, "  ^"),
        ("abab", 1, "  ^^"),
        ("abcabc", 3, "     ^"),
        ("ababbb", 2, "   ^ ^"),  # docs/evaluate.md
        ("abcdab", 2, "     ^"),
        ("ab", 2, "  "),
        ("a", 3, " "),
    ],
)
def test_cases_one_can_see(text: str, order: int, want: str) -> None:
    assert targets(text, order) == want


def test_documents_do_not_see_each_other() -> None:
    assert targets("ab.abab") == "    ^ ^"
    assert targets("ab.abab", reset=".") == "      ^"
    assert targets("a.ba.b") == "    ^^"  # (a, .) and (., b) again
    assert targets("a.ba.b", reset=".") == "      "


@settings(max_examples=150, deadline=None)
@given(
    rows=st.integers(1, 20).flatmap(
        lambda t: st.lists(st.lists(st.integers(0, 4), min_size=t, max_size=t), min_size=1, max_size=3)
    ),
    order=st.integers(1, 5),
    reset=st.one_of(st.none(), st.integers(0, 4)),
    large=st.booleans(),
)
def test_equal_to_reading_token_by_token(rows: list[list[int]], order: int, reset: int | None, large: bool) -> None:
    names = [3 * 2**60 + i for i in range(5)] if large else range(5)  # numbers whose powers do not fit into 64 bits
    rows, reset = [[names[i] for i in row] for row in rows], None if reset is None else names[reset]
    tokens = torch.tensor(rows)
    want = torch.tensor([by_reading(row, order, reset) for row in rows])
    assert torch.equal(distance_to_previous(tokens, order, reset_token=reset), want)
    assert torch.equal(ar_mask(tokens, order, reset_token=reset), want > 0)


def test_long_windows_of_a_large_vocabulary() -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = (torch.rand(2, 3000, generator=generator) ** 8 * 50304).long()  # some words are frequent, most are not
    for order in (1, 2, 5):
        want = torch.tensor([by_reading(row, order, None) for row in tokens.tolist()])
        assert torch.equal(distance_to_previous(tokens, order), want)
        assert 0 < (want > 0).float().mean() < 1


@pytest.mark.gpu
def test_the_same_on_a_gpu() -> None:
    tokens = (torch.rand(4, 2000, generator=torch.Generator().manual_seed(0)) ** 8 * 50304).long()
    counts = count_ngrams([tokens], 2, 50304, among=[tokens])
    for order in (1, 2, 5):
        want = distance_to_previous(tokens, order, reset_token=7)
        assert torch.equal(distance_to_previous(tokens.cuda(), order, reset_token=7).cpu(), want)
    capped = ar_mask(tokens, frequency=counts, max_count=9)
    assert torch.equal(ar_mask(tokens.cuda(), frequency=counts, max_count=9).cpu(), capped)


def test_tokens_as_shards_hold_them() -> None:
    assert torch.equal(ar_mask(read("abab").to(torch.uint16)), ar_mask(read("abab")))


class TestFrequencyCap:
    """A bigram that is common in the training text is not AR."""

    training = (read("abababab"), read("cdc"))  # ab 4 times, ba 3, cd and dc once

    def test_counts(self) -> None:
        counts = count_ngrams(self.training, 2, 9, among=(read("abcdabcd"), read("cd")))
        assert counts.of(read("abcdabh")).tolist() == [[0, 4, 0, 1, 0, 4, 0]]

    def test_rows_of_one_stream_add_up(self) -> None:
        assert count_ngrams([read("ab"), read("ab")], 2, 9, among=[read("ab")]).of(read("ab")).tolist() == [[0, 2]]

    def test_the_cap(self) -> None:
        text = read("abcdabcd")
        counts = count_ngrams(self.training, 2, 9, among=[text])
        assert ar_mask(text).int().tolist() == [[0, 0, 0, 0, 0, 1, 1, 1]]
        assert ar_mask(text, frequency=counts, max_count=3).int().tolist() == [[0, 0, 0, 0, 0, 0, 1, 1]]
        assert ar_mask(text, frequency=counts, max_count=4).int().tolist() == [[0, 0, 0, 0, 0, 1, 1, 1]]
        assert ar_mask(text, frequency=counts, max_count=0).int().tolist() == [[0, 0, 0, 0, 0, 0, 1, 0]]  # bc is new

    def test_mistakes(self) -> None:
        counts = count_ngrams(self.training, 2, 9, among=[read("ab")])
        with pytest.raises(ValueError, match="needs both"):
            ar_mask(read("ab"), max_count=3)
        with pytest.raises(ValueError, match="max_count must be 0 or more, got -1"):
            ar_mask(read("ab"), frequency=counts, max_count=-1)
        with pytest.raises(ValueError, match="2-grams, and the rule needs 3-grams"):
            ar_mask(read("ab"), 3, frequency=counts, max_count=1)
        with pytest.raises(ValueError, match="order 5 over 50304 tokens do not fit"):
            count_ngrams(self.training, 5, 50304, among=[read("ab")])
        with pytest.raises(ValueError, match="token 3 is outside the vocabulary of 2"):
            count_ngrams([read("ad")], 2, 2, among=[read("ab")])


def test_mistakes() -> None:
    with pytest.raises(ValueError, match=r"must be \[B, T\]; their shape is \[4\]"):
        ar_mask(read("abab")[0])
    with pytest.raises(ValueError, match="order must be at least 1"):
        ar_mask(read("abab"), 0)
    with pytest.raises(ValueError, match="got -100: give inputs, not labels"):
        ar_mask(torch.tensor([[1, -100]]))


def test_a_rule_is_the_mask_with_distances() -> None:
    assert ARRule(order=1).distances(read("abca")).tolist() == [[0, 0, 0, 3]]


def test_the_share_of_real_text() -> None:
    """The paper's rule is bigrams, not single tokens: the AR share at T = 4,096 is near 0.45, not above 0.7."""
    tokenizer = load_tokenizer(str(real_data("gpt-neox-20b.20B_tokenizer.json.xz")))
    with lzma.open(real_data("wikitext2-test.txt.xz"), "rt") as file:
        tokens = torch.tensor(tokenizer.encode(file.read(400_000)))
    windows = tokens[: len(tokens) // 4096 * 4096].view(-1, 4096)
    assert 0.35 < ar_mask(windows).float().mean() < 0.5
    assert ar_mask(windows, order=1).float().mean() > 0.7
