"""Bounds on records, all in one place, and reading within them. Whatever a file holds, reading it takes bounded memory.

A bundle of 100,000 runs is far below every bound: its lines have a few kilobytes, and compression makes it ten times
smaller.
"""

import gzip
import json
import lzma
import re
from collections.abc import Callable, Iterator
from math import isfinite
from pathlib import Path
from typing import Any, BinaryIO

MAX_LINE_BYTES = 2**24  # of one line: a sweep's line about 100,000 runs has two million
MAX_LINES = 10**6  # of one record: a line per ten steps of ten million
MAX_RATIO = 1000  # of the size of a bundle to that of its file
MIN_LINES = 10**5  # lines that a bundle may have in any case; else one per byte of its file
MIN_UNPACKED = 2**26  # bytes that a bundle may have in any case
MAX_DEPTH = 32  # of lists and mappings in one another: configs have six
MAX_DIGITS = 20  # of a whole number: 64 bits have up to 20
MAX_TEXT = 1000  # characters of a name or another setting
MAX_SIZE = 2**24  # of a width, a length, a vocabulary
MAX_LAYERS = 1024
MAX_NAMED = 100  # records that are named because they are left out; all are counted
MAX_COUNT = 2**53  # of examples, tokens, parameters, steps: whole numbers that a float holds

OPENERS: dict[str, Callable[..., Any]] = {".jsonl": open, ".gz": gzip.open, ".xz": lzma.open}
_LONG_NUMBER = re.compile(rb"\d{%d}" % (MAX_DIGITS + 1))
_SKIPPED = 2**20  # bytes at a time of a line that is too long


class TooLarge(ValueError):
    """A compressed file holds more than MAX_RATIO times its size, or more than one line per byte."""


def read_lines(path: Path) -> Iterator[bytes]:
    """The lines of a record or bundle, each with its line break. A line that is too long is empty.

    The last one has no line break if it is still being written. Raises TooLarge, and what gzip and lzma raise.
    """
    size = path.stat().st_size
    most = None if path.suffix == ".jsonl" else max(MIN_UNPACKED, MAX_RATIO * size)
    read, lines_left = 0, max(MIN_LINES, size)
    with OPENERS[path.suffix](path, "rb") as file:
        while line := file.readline(MAX_LINE_BYTES):
            read += len(line)
            lines_left -= 1
            if lines_left < 0 and most is not None:
                raise TooLarge(f"it holds more than {max(MIN_LINES, size):,} lines")
            if len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
                for size in _skip_line(file):
                    read += size
                    _check_unpacked(read, most)
                line = b""
            _check_unpacked(read, most)
            yield line


def _check_unpacked(read: int, most: int | None) -> None:
    if most is not None and read > most:
        raise TooLarge(f"it holds more than {most:,} bytes, {MAX_RATIO} times its size")


def _skip_line(file: BinaryIO) -> Iterator[int]:
    """Read the rest of a line. Yields the sizes of its pieces."""
    while piece := file.readline(_SKIPPED):
        yield len(piece)
        if piece.endswith(b"\n"):
            return


def parse_line(text: bytes) -> dict[str, Any]:
    """A line of a record. Raises ValueError if it is not a JSON object, too long, too deep or has a number too long."""
    if len(text) > MAX_LINE_BYTES:
        raise ValueError(f"it has more than {MAX_LINE_BYTES:,} bytes")
    parse_int = _parse_int if _LONG_NUMBER.search(text) else None
    try:
        line = json.loads(text.decode(), parse_int=parse_int, parse_constant=_refuse)
        too_deep = text.count(b"[") + text.count(b"{") > MAX_DEPTH and _depth(line) > MAX_DEPTH
    except RecursionError:
        too_deep = True
    if too_deep:
        raise ValueError(f"it is nested more than {MAX_DEPTH} deep")
    if not isinstance(line, dict):
        raise ValueError("it is not a JSON object")
    if b"\\u" in text:
        json.dumps(line, ensure_ascii=False).encode()  # half of a surrogate pair is no text
    return line


def check_leaves(tree: Any) -> None:
    """Raise ValueError if a setting in a parsed tree is too long a text, or not a finite number."""
    left = [tree]
    while left:
        node = left.pop()
        if isinstance(node, dict):
            left.extend(node)
            left.extend(node.values())
        elif isinstance(node, list):
            left.extend(node)
        elif isinstance(node, str):
            if len(node) > MAX_TEXT:
                raise ValueError(f"a setting has {len(node):,} characters: {node[:40]!r}...")
        elif isinstance(node, float) and not isfinite(node):
            raise ValueError(f"a setting is {node}")


def _depth(tree: Any) -> int:
    inside = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else None
    return 0 if inside is None else 1 + max(map(_depth, inside), default=0)


def _parse_int(digits: str) -> int:
    if len(digits.lstrip("-")) > MAX_DIGITS:
        raise ValueError(f"a number has {len(digits)} digits")
    return int(digits)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not a number in JSON")
