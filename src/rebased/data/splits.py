"""Which split each document goes to: by shares, by bytes, or by source."""

import difflib
import hashlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from rebased.data.encode_chunks import divide
from rebased.data.sources import Document, Kind

DEFAULT_SPLIT = "train=0.9,valid=0.05,test=0.05"
UNITS = {"B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
CHARACTER = 3  # a cut that moves back to the start of a UTF-8 character moves by at most so many bytes
NUMBER = r"(?:\d+\.?\d*|\.\d+)"
SIZE = rf"({NUMBER})({'|'.join(UNITS)})"
KNOWN_NAMES = ("train", "valid", "test")  # splits that training looks for; a folder may have others
EXAMPLES = "train=0.9,valid=0.1 or train=90MB,valid=5MB or train=a.txt,valid=b.txt"


class SplitNotFilled(ValueError):
    """All sources have been read, and a split is empty or got less than it should."""


class Chunk(NamedTuple):
    """Consecutive bytes of one document that go to one split."""

    kind: Kind
    data: bytes
    is_last: bool  # of this document in this split
    source: str  # where the document is from, for messages
    dtype: str  # of tokens; "" for text


class Rule:
    """Which split each document goes to: the first, unless a subclass says otherwise."""

    divided = 0  # documents so far
    duplicates = 0  # documents so far that were left out, because equal ones had come before

    def __init__(self, shares: Mapping[str, float]) -> None:
        self._bounds = list(zip(shares, accumulate(shares.values()), strict=True))

    def ranges(self, number: int, document: Document) -> list[tuple[str | None, float]]:
        """The ranges that document `number` is divided into: (split, byte offset where its range ends), in order.

        The last offset is inf. The split None means that the range is left out.
        """
        return [(self._bounds[0][0], math.inf)]

    def advance(self, size: int, complete: bool) -> bool:
        """Called after each document with the bytes that went to splits, and whether nothing was left out.

        Returns whether more documents are wanted.
        """
        return True

    def _drawn(self, digest: bytes) -> str | None:
        """The split whose share a digest of eight bytes falls into."""
        draw = int.from_bytes(digest, "little") / 2**64
        return next((split for split, bound in self._bounds if draw < bound), None)


def assign_splits(documents: Iterable[Document], rule: Rule) -> Iterator[tuple[str, Chunk]]:
    """(split, chunk) for all documents in order, until the rule wants no more."""
    for number, document in enumerate(documents):
        ranges = rule.ranges(number, document)
        ends = [int(end) for _, end in ranges if not math.isinf(end)]
        align = int(document.dtype[-1]) if document.kind == "tokens" else 1
        size, complete = 0, True
        for index, data, is_last in divide(document.chunks, ends, align):
            split = ranges[index][0]
            if split is None:
                complete = False
                break
            size += len(data)
            yield split, Chunk(document.kind, data, is_last, document.source, document.dtype)
        if not rule.advance(size, complete):
            return


class ByShare(Rule):
    """Assign each document to a split by a hash of its number: a split gets about its share of the documents.

    A document larger than the smallest split would distort the shares, so it is divided: its beginning goes to the
    first split, and so on. `total` is the size of all sources in bytes; 0 if it is not known.
    """

    def __init__(self, shares: dict[str, float], total: int) -> None:
        super().__init__(shares)
        everything = len(shares) == 1 and self._bounds[-1][1] >= 1  # goes to one split: no document is divided
        self._large = min(shares.values()) * total if total and not everything else math.inf

    def ranges(self, number: int, document: Document) -> list[tuple[str | None, float]]:
        if document.divisible and self._large < math.inf and (size := document.size()) > self._large:
            self.divided += 1
            cuts: list[tuple[str | None, float]] = [(split, round(bound * size)) for split, bound in self._bounds]
            return [*cuts, (None, math.inf)]
        digest = hashlib.blake2b(number.to_bytes(8, "little"), digest_size=8).digest()
        return [(self._drawn(digest), math.inf)]


class ByContent(Rule):
    """Assign each document to a split by a hash of its content, and leave out a document that has come before.

    Equal documents are therefore in one split, and where a document is read does not matter.
    """

    def __init__(self, shares: dict[str, float]) -> None:
        super().__init__(shares)
        self._seen: set[bytes] = set()

    def ranges(self, number: int, document: Document) -> list[tuple[str | None, float]]:
        # The chunks of the document are a list: they are read again later.
        digest = hashlib.sha256(b"".join(document.chunks)).digest()
        if digest in self._seen:
            self.duplicates += 1
            return [(None, math.inf)]
        self._seen.add(digest)
        return [(self._drawn(digest[:8]), math.inf)]


class BySize(Rule):
    """Give the first bytes of the sources to the first split, the next to the second, and leave out the rest.

    A text is cut at that byte, or before the UTF-8 character that contains it. A line of JSON is not cut: it goes to
    the split in which it begins.
    """

    def __init__(self, sizes: dict[str, int]) -> None:
        super().__init__(sizes)
        self._done = 0

    def ranges(self, number: int, document: Document) -> list[tuple[str | None, float]]:
        left: list[tuple[str | None, float]] = [
            (split, bound - self._done) for split, bound in self._bounds if bound > self._done
        ]
        return [*left, (None, math.inf)] if document.divisible else [(left[0][0], math.inf)]

    def advance(self, size: int, complete: bool) -> bool:
        self._done += size
        return complete and self._done < self._bounds[-1][1]

    def check_enough(self) -> None:
        """Raise `SplitNotFilled` if the sources had too few bytes for all splits."""
        wanted = self._bounds[-1][1]
        if self._done < wanted - CHARACTER:
            raise SplitNotFilled(f"--split wants {wanted:,} bytes and the sources have {self._done:,}; ask for less")


class SplitSpec(NamedTuple):
    """What --split says, by the name of the split. Exactly one of the three is not empty."""

    shares: dict[str, float]
    sizes: dict[str, int]  # bytes
    sources: dict[str, list[str]]

    @property
    def names(self) -> list[str]:
        """The names of all splits, in order."""
        return [*self.shares, *self.sizes, *self.sources]


def parse_size(text: str) -> int:
    """The bytes that a size with a unit means: "90MB" is 90,000,000 and "1KiB" 1,024."""
    match = re.fullmatch(SIZE, text)
    if match is None or float(match[1]) == 0:
        raise ValueError(f"{text!r} is not a size above 0 with a unit: {', '.join(UNITS)}")
    return round(float(match[1]) * UNITS[match[2]])


def parse_split(words: Sequence[str]) -> SplitSpec:
    """What the values of --split mean: NAME=VALUE items, separated by commas.

    All values are shares (0.9 or 90%), sizes (90MB) or sources (a.txt, several per name). A name may be any, but one
    that looks like a misspelt train, valid or test is an error.
    """
    spec = SplitSpec({}, {}, {})
    for item in (item for word in words for item in word.split(",")):
        name, equals, value = item.partition("=")
        if not equals or not value or not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", name):
            raise ValueError(f"--split {item!r} is not NAME=VALUE; such as {EXAMPLES}")
        if name in spec.shares or name in spec.sizes:
            raise ValueError(f"--split names {name!r} twice")
        if value.startswith("-"):
            raise ValueError(f"--split {item!r}: a share or a size must be above 0; such as {EXAMPLES}")
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
    for name in spec.names:
        near = difflib.get_close_matches(name, KNOWN_NAMES, n=1, cutoff=0.65)
        if near and near[0] not in spec.names:
            raise ValueError(
                f"--split has {name!r} and no {near[0]!r}; did you mean {near[0]!r}? Training looks for train and "
                "valid, and measures test"
            )
    return spec
