"""record.jsonl: the history of a run, one JSON object per line. Lines are only ever appended.

Each line has a "type". The first line is "run" (config, digest, code, machine). One "epoch" line per epoch follows, and
"end" is the last. "resume" says that the run was resumed with other code or on another machine, "out_of_memory" that it
continued with fewer sequences at once. In the file the last line also has a checksum of the whole record, which is
compared and removed by whoever reads it; records of older versions have none.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from rebased.files import NotSaved
from rebased.runs.limits import parse_line

RECORD = "record.jsonl"
CHECKSUM = "sha256"  # a key of the last line


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
        return {"bytes": self.size, "sha256": self._checksum(self.size)}

    def _checksum(self, size: int) -> str:
        return self._hash(size).hexdigest()

    def _hash(self, size: int) -> "hashlib._Hash":
        return hashlib.sha256(self.path.read_bytes()[:size] if self.path.exists() else b"")

    def rewind(self, size: int, sha256: str | None = None) -> None:
        """Drop the lines after the first `size` bytes, and a last line that is not whole.

        sha256: the checksum that those first bytes must have.
        """
        if size > self.size:
            raise ValueError(
                f"{self.path} is damaged: it holds {self.size} bytes, and its checkpoint was saved after {size}; "
                f"remove {self.path.parent} and train the run again, or start it in another folder"
            )
        if sha256 is not None and self._checksum(size) != sha256:
            raise ValueError(
                f"{self.path} is damaged: its first {size} bytes are not those that its checkpoint was saved with; "
                "restore it, or start the run again in another folder"
            )
        if self.path.exists():
            self._truncate(size)
            self._read()

    def _read(self) -> None:
        self.lines, errors, self.size = _read(self.path)
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
    lines, errors, _ = _read(path / RECORD if path.is_dir() else path)
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


def _read(path: Path) -> tuple[list[dict[str, Any]], list[ValueError], int]:
    """(the valid lines, one error per damaged line, how many bytes the complete lines have)."""
    data = path.read_bytes()
    complete = data[: data.rfind(b"\n") + 1]
    lines, errors = [], []
    for number, text in enumerate(complete.splitlines(), start=1):
        try:
            line = parse_line(text)
            valid = isinstance(line["type"], str) and (line["type"] != "end" or isinstance(line["status"], str))
        except (ValueError, KeyError):
            valid = False
        if not valid:
            errors.append(
                ValueError(
                    f"{path} is damaged in line {number}: {text[:60]!r} is not a record; repair the line, or remove "
                    f"{path.parent} and train the run again"
                )
            )
        else:
            lines.append(line)
    expected = lines[-1].pop(CHECKSUM, None) if lines and lines[-1]["type"] == "end" else None
    if expected is not None and not errors:
        earlier = hashlib.sha256(complete[: complete.rstrip(b"\n").rfind(b"\n") + 1])
        if end_checksum(earlier, lines[-1]) != expected:
            errors.append(
                ValueError(
                    f"{path} is damaged: its checksum is not that of its lines; restore it, or remove {path.parent} "
                    "and train the run again"
                )
            )
    return lines, errors, len(complete)
