"""Splits: what --split means, and which bytes go to which split."""

from collections import Counter

import pytest

from rebased.data.sources import Document
from rebased.data.splits import ByShare, BySize, assign_splits, parse_size, parse_split


def text(content: bytes, *, divisible: bool = True) -> Document:
    return Document("text", "memory", [content] if content else [], content.__len__, divisible=divisible)


def assigned(documents: list[Document], rule: ByShare | BySize) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for split, chunk in assign_splits(documents, rule):
        found[split] = found.get(split, b"") + chunk.data + (b"|" if chunk.is_last else b"")
    return found


def test_split_words() -> None:
    assert parse_split(["train=0.9,valid=5%"]).shares == {"train": 0.9, "valid": 0.05}
    assert parse_split(["train=90MB", "valid=5KiB"]).sizes == {"train": 90_000_000, "valid": 5120}
    sources = parse_split(["train=a.txt,train=b.txt", "valid=hf:name:config@test"]).sources
    assert sources == {"train": ["a.txt", "b.txt"], "valid": ["hf:name:config@test"]}
    assert parse_split(["train=0.5,train2=0.1,wiki=0.1"]).names == ["train", "train2", "wiki"]
    assert parse_size("1.5GB") == 1_500_000_000


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train"], "--split 'train' is not NAME=VALUE"),
        (["train="], "is not NAME=VALUE"),
        (["1st=0.5"], "is not NAME=VALUE"),
        (["train=0.5,train=0.5"], "names 'train' twice"),
        (["train=0.5,valid=5MB"], "mixes shares, bytes and sources"),
        (["train=90,valid=5"], "shares must be above 0 and at most 1 together"),
        (["train=0,valid=1"], "shares must be above 0"),
        (["train=0MB"], "'0MB' is not a size above 0"),
        (["train=-1"], "--split 'train=-1': a share or a size must be above 0; such as train=0.9"),
        (["train=0.9,valid=-5MB"], "--split 'valid=-5MB': a share or a size must be above 0"),
        (["tarin=90MB,valid=5MB"], "--split has 'tarin' and no 'train'; did you mean 'train'"),
        (["train=a.txt,val=b.txt"], "--split has 'val' and no 'valid'; did you mean 'valid'"),
        (["train=0.9,validation=0.1"], "did you mean 'valid'"),
    ],
)
def test_bad_split_words(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_split(words)


def test_bytes_are_cut_exactly_and_characters_kept() -> None:
    documents = [text(b"0123456789"), text(b""), text("é漢x".encode()), text(b"rest"), text(b"never read")]
    assert assigned(documents, BySize({"train": 8, "valid": 5, "test": 4})) == {
        "train": b"01234567|",
        "valid": b"89|" + "é".encode() + b"|",  # byte 13 is within the next character
        "test": "漢x".encode() + b"|r|",
    }


def test_bytes_keep_lines_of_json_whole() -> None:
    lines = [text(b"{1234}", divisible=False) for _ in range(4)]
    assert assigned(lines, BySize({"train": 8, "valid": 5})) == {"train": b"{1234}|{1234}|", "valid": b"{1234}|"}


def test_too_few_bytes() -> None:
    rule = BySize({"train": 8, "valid": 8})
    assigned([text(b"0123456789")], rule)
    with pytest.raises(ValueError, match=r"--split wants 16 bytes and the sources have 10; ask for less"):
        rule.check_enough()
    rule = BySize({"train": 8, "valid": 2})
    assigned([text(b"0123456789")], rule)
    rule.check_enough()


def test_shares_assign_documents_by_hash() -> None:
    documents = [text(b"x" * 10) for _ in range(3000)]
    rule = ByShare({"train": 0.8, "valid": 0.1}, total=30_000)
    counts = Counter({split: len(content) // 11 for split, content in assigned(documents, rule).items()})
    assert 2300 < counts["train"] < 2500  # 2400 with a standard deviation of 22; a tenth is left out
    assert 250 < counts["valid"] < 350
    again = assigned([text(b"y" * 10) for _ in range(3000)], ByShare({"train": 0.8, "valid": 0.1}, total=30_000))
    assert {split: len(content) // 11 for split, content in again.items()} == counts


def test_shares_cut_a_document_that_is_too_large() -> None:
    big = bytes(range(65, 75)) * 10
    found = assigned([text(big), text(b"s")], ByShare({"train": 0.9, "valid": 0.05, "test": 0.05}, total=101))
    assert found["train"].startswith(big[:90] + b"|")
    assert found["valid"].startswith(big[90:95] + b"|")
    assert found["test"].startswith(big[95:] + b"|")
    assert sum(map(len, found.values())) == 101 + 4
