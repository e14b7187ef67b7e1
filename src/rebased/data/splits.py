"""Which split a document goes to: by shares, by bytes, or by where it comes from."""

import hashlib
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

from rebased.data.encode_chunks import divide
from rebased.data.sources import Document, Kind

DEFAULT_SPLIT = "train=0.9,valid=0.05,test=0.05"
UNITS = {"B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
CHARACTER = 3  # by how many bytes the start of a character may come before its end
NUMBER = r"(?:\d+\.?\d*|\.\d+)"
SIZE = rf"({NUMBER})({'|'.join(UNITS)})"
EXAMPLES = "train=0.9,valid=0.1 or train=90MB,valid=5MB or train=a.txt,valid=b.txt"


class NeverWhole(ValueError):
    """All sources have been read, and a split did not get what it was to get."""


class Part(NamedTuple):
    kind: Kind
    data: bytes
    ends: bool  # its document, as far as this split has it
    source: str
    dtype: str


class Rule(Protocol):
    def stretches(self, number: int, document: Document) -> list[tuple[str | None, float]]:
        """(split, up to which of the document's bytes) in order, the last without end; None for what no split takes."""
        ...

    def took(self, size: int, whole: bool) -> bool:
        """Told after each document how much of it went to splits, and if that was all: is there room for more?"""
        ...


def deal(documents: Iterable[Document], rule: Rule) -> Iterator[tuple[str, Part]]:
    for number, document in enumerate(documents):
        stretches = rule.stretches(number, document)
        ends = [int(end) for _, end in stretches if not math.isinf(end)]
        align = int(document.dtype[-1]) if document.kind == "tokens" else 1
        size, whole = 0, True
        for stretch, data, is_end in divide(document.parts, ends, align):
            split = stretches[stretch][0]
            if split is None:
                whole = False
                break
            size += len(data)
            yield split, Part(document.kind, data, is_end, document.source, document.dtype)
        if not rule.took(size, whole):
            return


class ByShare:
    """A document goes to a split by a hash of its number, whatever else there is. One that is larger than the smallest
    split would upset the shares, so it is cut: its beginning for the first split, and so on."""

    def __init__(self, shares: dict[str, float], total: int) -> None:
        self._bounds, bound = [], 0.0
        for split, share in shares.items():
            bound += share
            self._bounds.append((split, bound))
        everything = len(shares) == 1 and bound >= 1  # to one split: nothing to cut, and no need to know sizes
        self._large = min(shares.values()) * total if total and not everything else math.inf

    def stretches(self, number: int, document: Document) -> list[tuple[str | None, float]]:
        if document.divisible and self._large < math.inf and (size := document.size()) > self._large:
            cuts: list[tuple[str | None, float]] = [(split, round(bound * size)) for split, bound in self._bounds]
            return [*cuts, (None, math.inf)]
        digest = hashlib.blake2b(number.to_bytes(8, "little"), digest_size=8).digest()
        draw = int.from_bytes(digest, "little") / 2**64
        return [(next((split for split, bound in self._bounds if draw < bound), None), math.inf)]

    def took(self, size: int, whole: bool) -> bool:
        return True


class BySize:
    """The first bytes of the sources are the first split's, the next ones the second's, and the rest is left out. A
    text is cut at that byte, or right before the character it is in; a line of JSON goes where it begins."""

    def __init__(self, sizes: dict[str, int]) -> None:
        self._bounds, bound = [], 0
        for split, size in sizes.items():
            bound += size
            self._bounds.append((split, bound))
        self._done = 0

    def stretches(self, number: int, document: Document) -> list[tuple[str | None, float]]:
        left: list[tuple[str | None, float]] = [
            (split, bound - self._done) for split, bound in self._bounds if bound > self._done
        ]
        return [*left, (None, math.inf)] if document.divisible else [(left[0][0], math.inf)]

    def took(self, size: int, whole: bool) -> bool:
        self._done += size
        return whole and self._done < self._bounds[-1][1]

    def check_enough(self) -> None:
        wanted = self._bounds[-1][1]
        if self._done < wanted - CHARACTER:
            raise NeverWhole(f"--split wants {wanted:,} bytes and the sources have {self._done:,}; ask for less")


class BySource:
    """Everything to one split."""

    def __init__(self, split: str) -> None:
        self._split = split

    def stretches(self, number: int, document: Document) -> list[tuple[str | None, float]]:
        return [(self._split, math.inf)]

    def took(self, size: int, whole: bool) -> bool:
        return True


class SplitSpec(NamedTuple):
    """What --split says: exactly one of the three is not empty."""

    shares: dict[str, float]
    sizes: dict[str, int]
    sources: dict[str, list[str]]

    @property
    def names(self) -> list[str]:
        return [*self.shares, *self.sizes, *self.sources]


def parse_size(text: str) -> int:
    """90MB is 90,000,000 bytes."""
    match = re.fullmatch(SIZE, text)
    if match is None or float(match[1]) == 0:
        raise ValueError(f"{text!r} is not a size above 0 with a unit: {', '.join(UNITS)}")
    return round(float(match[1]) * UNITS[match[2]])


def parse_split(words: Sequence[str]) -> SplitSpec:
    spec = SplitSpec({}, {}, {})
    for item in (item for word in words for item in word.split(",")):
        name, equals, value = item.partition("=")
        if not equals or not value or not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", name):
            raise ValueError(f"--split {item!r} is not NAME=VALUE; such as {EXAMPLES}")
        if name in spec.shares or name in spec.sizes:
            raise ValueError(f"--split names {name!r} twice")
        if share := re.fullmatch(rf"({NUMBER})(%?)", value):
            spec.shares[name] = float(share[1]) / (100 if share[2] else 1)
        elif re.fullmatch(SIZE, value):
            spec.sizes[name] = parse_size(value)
        else:
            spec.sources.setdefault(name, []).append(value)
    if sum(map(bool, spec)) != 1:
        raise ValueError(f"--split {','.join(words)} mixes shares, bytes and sources; use one of them: {EXAMPLES}")
    if spec.shares and (min(spec.shares.values()) <= 0 or sum(spec.shares.values()) > 1 + 1e-9):
        raise ValueError(
            f"--split: shares must be above 0 and at most 1 together, got {spec.shares}; bytes have a unit: train=90MB"
        )
    return spec
