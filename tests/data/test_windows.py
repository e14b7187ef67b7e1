"""Windows over a token stream: their tokens and labels, document boundaries, and their order in training."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rebased.data import Corpus, spread_rows, window_rows, write_corpus
from rebased.data.shards import Encoded, writing_shards
from rebased.data.windows import Windows

END = 256


class Stream:
    """A stream in memory."""

    def __init__(self, documents: list[list[int]]) -> None:
        self.tokens = np.array([token for document in documents for token in document])
        self.ends = np.cumsum([len(document) for document in documents])

    def __len__(self) -> int:
        return len(self.tokens)

    def read(self, start: int, stop: int) -> np.ndarray:
        return self.tokens[start:stop]

    def document_ends(self, start: int, stop: int) -> np.ndarray:
        return self.ends[(self.ends > start) & (self.ends <= stop)]


def test_windows_by_hand() -> None:
    windows = Windows(Stream([[1, 2, 3], [4, 5, 6, 7], [8, 9]]), 4)
    assert len(windows) == 2
    batch = windows.batch([1, 0])
    assert batch.tokens.tolist() == [[5, 6, 7, 8], [1, 2, 3, 4]]
    assert batch.labels.tolist() == [[6, 7, 8, 9], [2, 3, 4, 5]]
    assert batch.tokens.dtype == batch.labels.dtype == torch.int64
    assert batch.cu_seqlens is None


def test_isolated_documents_by_hand() -> None:
    windows = Windows(Stream([[1, 2, 3], [4], [5, 6, 7, 8, 9]]), 4, isolate_documents=True)
    batch = windows.batch(torch.tensor([0, 1]))
    assert batch.labels.tolist() == [[2, 3, -100, -100], [6, 7, 8, 9]]  # none predicts 4 or 5, which begin documents
    assert batch.cu_seqlens is not None
    assert batch.cu_seqlens.dtype == torch.int32
    assert batch.cu_seqlens.tolist() == [0, 3, 4, 8]


def test_the_last_window_is_filled_up() -> None:
    windows = Windows(Stream([[1, 2, 3, 4, 5, 6]]), 4, isolate_documents=True)
    batch = windows.batch([1])
    assert len(windows) == 2
    assert batch.tokens.tolist() == [[5, 6, 0, 0]]
    assert batch.labels.tolist() == [[6, -100, -100, -100]]
    assert Windows(Stream([[1, 2, 3, 4, 5]]), 4).batch([0]).labels.tolist() == [[2, 3, 4, 5]]
    assert len(Windows(Stream([[1, 2, 3, 4, 5]]), 4)) == 1


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=8).filter(lambda sizes: sum(sizes) > 1), st.integers(1, 7))
def test_every_token_is_predicted_once(sizes: list[int], seq_len: int) -> None:
    numbers = iter(range(1, 1000))
    documents = [[next(numbers) for _ in range(size)] for size in sizes]
    every = {token for document in documents for token in document}
    for isolate, never in ((False, {1}), (True, {document[0] for document in documents})):
        windows = Windows(Stream(documents), seq_len, isolate_documents=isolate)
        batch = windows.batch(range(len(windows)))
        labels = batch.labels[batch.labels != -100].tolist()
        assert sorted(labels) == sorted(every - never)
        known = batch.labels != -100
        assert torch.equal(batch.labels[known], batch.tokens[known] + 1)  # numbered in order
        if batch.cu_seqlens is not None:
            begins = batch.tokens.flatten()[batch.cu_seqlens[:-1].long()].tolist()
            assert {document[0] for document in documents} <= set(begins) | {documents[-1][-1]}
            assert batch.cu_seqlens.diff().min() > 0


@pytest.mark.parametrize("rows", [[2], [-1], []])
def test_rows_out_of_range(rows: list[int]) -> None:
    with pytest.raises(ValueError, match=r"rows must be some of 0 to 1, got"):
        Windows(Stream([[1, 2, 3, 4, 5, 6]]), 4).batch(rows)


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 300), st.integers(3, 40), st.integers(0, 5))
def test_every_window_once_an_epoch(n_windows: int, batch_size: int, seed: int) -> None:
    steps = -(-2 * n_windows // batch_size)
    rows = torch.cat([window_rows(n_windows, batch_size, seed, step) for step in range(steps)]).tolist()
    assert sorted(rows[:n_windows]) == list(range(n_windows))
    assert sorted(rows[n_windows : 2 * n_windows]) == list(range(n_windows))


def test_order_is_a_function_of_seed_and_step() -> None:
    assert window_rows(1000, 8, 3, 5).tolist() == [200, 482, 896, 310, 158, 3, 885, 547]  # never to change
    assert torch.equal(window_rows(1000, 8, 3, 5), window_rows(1000, 16, 3, 2)[8:])  # cut as one likes
    assert window_rows(1000, 8, 4, 5).tolist() != window_rows(1000, 8, 3, 5).tolist()
    assert window_rows(8, 8, 3, 0).tolist() != window_rows(8, 8, 3, 1).tolist()  # another order in the next epoch


def test_order_is_shuffled_well() -> None:
    n = 10_000
    rows = window_rows(n, n, 7, 0).numpy()
    assert abs(np.corrcoef(rows, np.arange(n))[0, 1]) < 0.03
    assert abs(np.corrcoef(rows[1:], rows[:-1])[0, 1]) < 0.03
    assert (np.abs(np.diff(rows)) == 1).mean() < 0.001
    places = Counter(int(window_rows(10, 1, seed, 0)[0]) for seed in range(2000))
    assert all(130 < places[row] < 270 for row in range(10))  # 200 each, standard deviation 13


def test_order_costs_nothing_at_any_size() -> None:
    rows = window_rows(10**15, 4, 0, 10**9)
    assert len(set(rows.tolist())) == 4
    assert int(rows.min()) >= 0
    assert int(rows.max()) < 10**15


@pytest.mark.parametrize(
    ("n_windows", "wanted", "rows"),
    [(10, 5, [0, 2, 4, 6, 8]), (10, 3, [0, 3, 6]), (10, 1, [0]), (3, 9, [0, 1, 2]), (3, None, [0, 1, 2])],
)
def test_some_windows_are_spread(n_windows: int, wanted: int | None, rows: list[int]) -> None:
    assert list(spread_rows(n_windows, wanted)) == rows


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="0 windows cannot be chosen; give 1 or more"):
        spread_rows(5, 0)
    with pytest.raises(ValueError, match="n_windows and batch_size must be at least 1, got 0 and 8"):
        window_rows(0, 8, 0, 0)
    with pytest.raises(ValueError, match="seed and step must be 0 or more, got -1 and 0"):
        window_rows(5, 8, -1, 0)
    with pytest.raises(ValueError, match="seq_len must be at least 1, got 0"):
        Windows(Stream([[1, 2]]), 0)
    with pytest.raises(ValueError, match="this split has 1 token;"):
        Windows(Stream([[1]]), 4)


def test_streams_over_several_shards_are_one_stream(tmp_path: Path) -> None:
    from rebased.data.manifest import Manifest, Split, TokenizerFile, write_manifest

    documents = [list(range(10 * i, 10 * i + size)) for i, size in enumerate((5, 1, 7, 3, 9))]
    stretches = [[(0, True), (1, True)], [(2, False)], [(3, True), (4, True)]]  # document 2 goes on into 3
    shards = []
    for index, stretch in enumerate(stretches):
        with writing_shards(tmp_path, index, "uint16") as group:
            for number, is_end in stretch:
                tokens = np.array(documents[number])
                group.append("train", Encoded(tokens, np.array([len(tokens)] if is_end else [], dtype=np.int64), 1))
            shards.append(group.finish()["train"])
    entry = TokenizerFile(name="bytes", file=None, vocab_size=300, end_of_text=None)
    splits = {"train": Split(shards=tuple(shards))}
    write_manifest(tmp_path, Manifest(format="rebased-text-1", dtype="uint16", tokenizer=entry, splits=splits))
    corpus = Corpus(tmp_path, verify=True)
    memory = Stream([documents[0], documents[1], documents[2] + documents[3], documents[4]])
    assert len(corpus.stream("train")) == len(memory)
    for seq_len in (1, 3, 6, 11, 40):
        ours = corpus.windows("train", seq_len, isolate_documents=True)
        theirs = Windows(memory, seq_len, isolate_documents=True)
        for mine, expected in zip(ours.batch(range(len(ours))), theirs.batch(range(len(theirs))), strict=True):
            assert mine is not None
            assert expected is not None
            assert torch.equal(mine, expected)


def test_a_corpus_from_memory(tmp_path: Path) -> None:
    write_corpus(tmp_path / "c", {"train": ["hé", "x"], "valid": ["abc"]})
    corpus = Corpus(tmp_path / "c", verify=True)
    assert corpus.vocab_size == 257
    assert corpus.end_of_text == END
    assert corpus.splits["train"].tokens == 6
    assert corpus.splits["train"].documents == 2
    assert corpus.splits["train"].text_bytes == 4
    batch = corpus.windows("train", 5).batch([0])
    assert batch.tokens.tolist() == [[104, 195, 169, 256, 120]]
    assert corpus.tokenizer.decode(batch.tokens[0].tolist()) == "héx"
    assert corpus.tokenizer.encode("hé") == [104, 195, 169]
    with pytest.raises(ValueError, match="has no split 'trian'; did you mean 'train'"):
        corpus.windows("trian", 4)
    with pytest.raises(ValueError, match="is not empty; choose another folder"):
        write_corpus(tmp_path / "c", {"train": ["x"]})
