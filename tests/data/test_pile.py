"""Tokenised files in Megatron's format, written here byte by byte."""

import struct
from pathlib import Path

import numpy as np
import pytest

from rebased.data import Corpus, PrepareConfig, prepare
from rebased.data.pile import TokenisedFile

CODES = {"<u2": 8, "<i4": 4, "<u1": 1}


def write_pair(path: Path, sequences: list[list[int]], documents: list[int], dtype: str = "<u2") -> Path:
    """`documents`: the first sequence of each document, then the number of sequences."""
    content = b"".join(np.array(sequence, dtype=dtype).tobytes() for sequence in sequences)
    sizes = [len(sequence) for sequence in sequences]
    pointers = np.cumsum([0, *sizes[:-1]]) * np.dtype(dtype).itemsize
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, CODES[dtype], len(sizes), len(documents))
    index += struct.pack(f"<{len(sizes)}i", *sizes) + struct.pack(f"<{len(sizes)}q", *pointers)
    index += struct.pack(f"<{len(documents)}q", *documents)
    path.with_suffix(".bin").write_bytes(content)
    path.with_suffix(".idx").write_bytes(index)
    return path.with_suffix(".idx")


@pytest.mark.parametrize("dtype", CODES)
def test_documents_of_several_sequences(tmp_path: Path, dtype: str) -> None:
    file = TokenisedFile(write_pair(tmp_path / "x", [[1, 2, 3], [4], [5, 6]], [0, 2, 3], dtype))
    assert len(file) == 2
    assert [file.document(i).view(dtype).tolist() for i in range(2)] == [[1, 2, 3, 4], [5, 6]]


def test_tokens_are_taken_as_they_are(tmp_path: Path) -> None:
    """A document ends where the index says, and after 256, the end-of-text token of the bytes tokenizer."""
    write_pair(tmp_path / "x", [[104, 105, 256], [97, 98, 256, 99], [100, 101]], [0, 1, 2, 3])
    config = PrepareConfig(sources=(str(tmp_path / "x.bin"),), split=("train=10MB",))
    with pytest.raises(ValueError, match="--split wants 10,000,000 bytes and the sources have 18"):
        prepare(config, tmp_path / "small")
    config = PrepareConfig(split=(f"train={tmp_path / 'x.idx'}",))
    corpus = Corpus(tmp_path / "out") if prepare(config, tmp_path / "out") else None
    assert corpus is not None
    stream = corpus.stream("train")
    assert stream.read(0, len(stream)).tolist() == [104, 105, 256, 97, 98, 256, 99, 100, 101]
    assert stream.document_ends(0, len(stream)).tolist() == [3, 6, 7, 9]
    assert corpus.splits["train"].text_bytes == 7


def test_tokens_of_another_vocabulary(tmp_path: Path) -> None:
    write_pair(tmp_path / "x", [[104, 50_000]], [0, 1])
    config = PrepareConfig(split=(f"train={tmp_path / 'x.idx'}",))
    with pytest.raises(ValueError, match=r"document 0 has token 50000, which is not in the vocabulary of bytes"):
        prepare(config, tmp_path / "out")


def test_damaged_pairs(tmp_path: Path) -> None:
    index = write_pair(tmp_path / "x", [[1, 2, 3], [4]], [0, 1, 2])
    good = index.read_bytes()

    def problem(content: bytes) -> str:
        index.write_bytes(content)
        with pytest.raises(ValueError) as raised:
            TokenisedFile(index)
        return str(raised.value)

    assert "is not a Megatron index: it does not begin with MMIDIDX" in problem(b"TNTIDX\x00\x00" + good[8:])
    assert "is not a Megatron index" in problem(b"")
    assert "is cut short: 81 of 82 bytes" in problem(good[:-1])
    assert "dtype code 6 is not known" in problem(good[:17] + b"\x06" + good[18:])
    assert "version 2" in problem(good[:9] + b"\x02" + good[10:])
    assert "its list of documents is empty or out of order" in problem(good[:-8] + struct.pack("<q", 1))
    assert "do not follow one another" in problem(good[:42] + struct.pack("<qq", 0, 4) + good[58:])
    index.write_bytes(good)
    (tmp_path / "x.bin").write_bytes(b"1234567")
    with pytest.raises(ValueError, match=r"x\.bin has 7 bytes and its index describes 8"):
        TokenisedFile(index)
    (tmp_path / "x.bin").unlink()
    with pytest.raises(ValueError, match=r"x\.bin is missing: tokenised text is a pair"):
        TokenisedFile(index)
