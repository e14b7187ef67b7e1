"""record.jsonl: the history of a run, one JSON object per line. Lines are only ever appended.

Each line has a "type". The first line is "run" (config, digest, code, machine). One "epoch" line per epoch follows, and
"end" is the last. "resume" says that the run was resumed with other code or on another machine, "out_of_memory" that it
continued with fewer sequences at once. In the file of one run the last line also has a checksum of the whole record,
which is compared and removed when the record is read.

A bundle is a compressed file of many records (collect.py). Whatever a file holds, reading it takes bounded memory. A
bundle of 100,000 runs is far below every bound: its lines have a few kilobytes, and compression makes it ten times
smaller.
"""

import gzip
import hashlib
import json
import lzma
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rebased.config import plain_tree
from rebased.files import NotSaved, refuse_pipe

RECORD = "record.jsonl"
CHECKSUM = "sha256"  # a key of the last line
CHANGED = "changed"  # the status of a record whose checksum does not fit

MAX_LINE_BYTES = 2**24  # of one line: a sweep's line about 100,000 runs has two million
MAX_RATIO = 1000  # of the size of a bundle to that of its file
MIN_LINES = 10**5  # lines that a bundle may have in any case; else one per byte of its file
MIN_UNPACKED = 2**26  # bytes that a bundle may have in any case
MAX_DEPTH = 32  # of lists and mappings in one another: configs have six
MAX_DIGITS = 20  # of a whole number: 64 bits have up to 20

OPENERS: dict[str, Callable[..., Any]] = {".jsonl": open, ".gz": gzip.open, ".xz": lzma.open}
_MAY_HIDE = re.compile(rb"\\u|\\[bfr]|[\x7f-\xff]")  # a control character: others cannot stand in JSON as they are
_LONG_NUMBER = re.compile(rb"\d{%d}" % (MAX_DIGITS + 1))


class TooLarge(ValueError):
    """A compressed file holds more than MAX_RATIO times its size, or more than one line per byte."""


class Record:
    """A record file that can be read and appended to. The file need not exist yet.

    A damaged line is an error, unless `skip_damaged`: then such lines are counted in `damaged` and left out. An
    incomplete last line, which a killed process may leave behind, is ignored.
    """

    def __init__(self, path: Path, *, skip_damaged: bool = False) -> None:
        self.path, self._skip_damaged = path, skip_damaged
        self.lines: list[dict[str, Any]] = []
        self.size = 0  # bytes of all complete lines
        self.damaged = 0  # how many lines were skipped
        if path.exists():
            self._read()

    @property
    def epochs(self) -> list[dict[str, Any]]:
        """The lines of type "epoch", in order."""
        return [line for line in self.lines if line["type"] == "epoch"]

    @property
    def end(self) -> dict[str, Any] | None:
        """The line of type "end"; None while the run has not ended."""
        return self.lines[-1] if self.lines and self.lines[-1]["type"] == "end" else None

    def append(self, line: dict[str, Any]) -> None:
        """Write one line to disk. If that fails, the file keeps its earlier lines and OSError is raised."""
        checksum = {CHECKSUM: end_checksum(self._hash(self.size), line)} if line["type"] == "end" else {}
        data = json.dumps(line | checksum, allow_nan=False).encode() + b"\n"
        try:
            with open(self.path, "ab") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            self._truncate(self.size)  # works on a full disk too
            raise self._not_written(error) from error
        self.lines.append(line)
        self.size += len(data)

    def describe(self) -> dict[str, Any]:
        """Size and checksum of the whole lines: {"bytes": ..., "sha256": ...}."""
        return {"bytes": self.size, "sha256": self._hash(self.size).hexdigest()}

    def _hash(self, size: int) -> "hashlib._Hash":
        return hashlib.sha256(self.path.read_bytes()[:size] if self.path.exists() else b"")

    def rewind(self, size: int, sha256: str | None = None) -> None:
        """Drop the lines after the first `size` bytes, and a last line that is not whole.

        sha256: the checksum that those first bytes must have.
        """
        if size > self.size or (sha256 is not None and self._hash(size).hexdigest() != sha256):
            raise ValueError(
                f"{self.path} is damaged: its first {size} bytes are not those that its checkpoint was saved with; "
                "restore it, or start the run again in another folder"
            )
        if self.path.exists():
            self._truncate(size)
            self._read()

    def _read(self) -> None:
        self.lines, errors = _read(self.path)
        self.size = self.path.read_bytes().rfind(b"\n") + 1
        if errors and not self._skip_damaged:
            raise errors[0]
        self.damaged = len(errors)

    def _truncate(self, size: int) -> None:
        try:
            with open(self.path, "r+b") as file:
                file.truncate(size)
                os.fsync(file.fileno())
        except OSError as error:
            raise self._not_written(error) from error

    def _not_written(self, error: OSError) -> NotSaved:
        return NotSaved(
            f"{self.path} could not be written: {error.strerror}; what was saved before is complete: "
            "make room, then resume the run"
        )


def end_checksum(earlier: "hashlib._Hash", end: dict[str, Any]) -> str:
    """The checksum of a record. `earlier` is the hash of all bytes before the last line, `end` that line without it."""
    whole = earlier.copy()
    whole.update(json.dumps(end).encode())
    return whole.hexdigest()


def read_record(path: Path | str) -> list[dict[str, Any]]:
    """The complete lines of a record file, or of the record in a run's folder. A damaged line raises ValueError."""
    path = Path(path)
    lines, errors = _read(path / RECORD if path.is_dir() else path)
    if errors:
        raise errors[0]
    return lines


def lines_so_far(folder: Path) -> list[dict[str, Any]]:
    """The lines of the record in `folder` that can be read now; empty if there is none, or a line is damaged.

    For runs that may not have begun, or that another process is writing.
    """
    try:
        return read_record(folder / RECORD)
    except (OSError, ValueError):
        return []


def _read(path: Path) -> tuple[list[dict[str, Any]], list[ValueError]]:
    """(the intact lines, one error per damaged line)."""
    found = list(scan(path))
    lines = [line for _, line in found if line is not None]
    damage = [
        f" in line {number}: {text[:60].rstrip()!r} is not a record"
        for number, (text, line) in enumerate(found, start=1)
        if line is None
    ]
    if lines and lines[-1].get("status") == CHANGED:
        damage.append(": its checksum is not that of its lines")
    remedy = f"restore it, or remove {path.parent} and train the run again"
    return lines, [ValueError(f"{path} is damaged{what}; {remedy}") for what in damage]


def scan(path: Path) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """(bytes, content) of each line of a record or bundle. The content of a damaged line is None.

    A last line without a line break is being written and is left out. If all lines of a record are intact and its
    checksum does not fit them, its status becomes CHANGED. Texts are plain: their control characters are written out.
    Raises TooLarge, and what gzip and lzma raise.
    """
    sha256, intact = hashlib.sha256(), True  # of one record
    for text in read_lines(path):
        if text and not text.endswith(b"\n"):
            return
        try:
            line = parse_line(text)
        except ValueError:
            intact = False
            yield text, None
            continue
        if line["type"] == "folder":  # the next record of a bundle
            sha256, intact = hashlib.sha256(), True
        elif line["type"] == "end" and CHECKSUM in line:
            expected = line.pop(CHECKSUM)
            if intact and end_checksum(sha256, line) != expected:
                line["status"] = CHANGED
        else:
            sha256.update(text)
        yield text, plain_tree(line) if _MAY_HIDE.search(text) else line


def read_lines(path: Path) -> Iterator[bytes]:
    """The lines of a record or bundle, each with its line break; b"" in place of a line that is too long.

    The last one has no line break if it is still being written. Raises TooLarge, and what gzip and lzma raise.
    """
    size = refuse_pipe(path).st_size
    packed = path.suffix in (".gz", ".xz")
    most_bytes, most_lines = max(MIN_UNPACKED, MAX_RATIO * size), max(MIN_LINES, size)
    unpacked = lines = 0
    skipping = False  # a line that is too long arrives in several pieces
    with OPENERS.get(path.suffix, open)(path, "rb") as file:
        while piece := file.readline(MAX_LINE_BYTES):
            unpacked += len(piece)
            if packed and unpacked > most_bytes:
                raise TooLarge(f"it holds more than {most_bytes:,} bytes, {MAX_RATIO} times its size")
            ended = piece.endswith(b"\n") or len(piece) < MAX_LINE_BYTES
            if ended:
                lines += 1
                if packed and lines > most_lines:
                    raise TooLarge(f"it holds more than {most_lines:,} lines")
                yield b"" if skipping else piece
            skipping = not ended
    if skipping:
        yield b""


def parse_line(text: bytes) -> dict[str, Any]:
    """A line of a record. Raises ValueError if it is not a JSON object with a type, and with a status if that is "end",
    if it is nested too deep, or has a number too long."""
    parse_int = _parse_int if _LONG_NUMBER.search(text) else None
    try:
        line = json.loads(text.decode(), parse_int=parse_int, parse_constant=_refuse)
        too_deep = text.count(b"[") + text.count(b"{") > MAX_DEPTH and _depth(line) > MAX_DEPTH
    except RecursionError:
        too_deep = True
    if too_deep:
        raise ValueError(f"it is nested more than {MAX_DEPTH} deep")
    if not isinstance(line, dict) or not isinstance(line.get("type"), str):
        raise ValueError("it is not a JSON object with a type")
    if line["type"] == "end" and not isinstance(line.get("status"), str):
        raise ValueError("the end has no status")
    if b"\\u" in text:
        json.dumps(line, ensure_ascii=False).encode()  # half of a surrogate pair is no text
    return line


def _depth(tree: Any) -> int:
    inside = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else None
    return 0 if inside is None else 1 + max(map(_depth, inside), default=0)


def _parse_int(digits: str) -> int:
    if len(digits.lstrip("-")) > MAX_DIGITS:
        raise ValueError(f"a number has {len(digits)} digits")
    return int(digits)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not a number in JSON")
