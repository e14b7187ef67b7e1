"""record.jsonl: what a run was and what came of it, a line an event, only ever appended to.

The first line has type "run" (config, digest, code, machine), then one of type "epoch" an epoch, the last has type
"end". A line of type "resume" stands where a run went on with other code or on another machine, one of type
"out_of_memory" where it went on with fewer sequences at once.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

RECORD = "record.jsonl"


class Record:
    """The record of a run that is under way; or of a sweep, which does without lines that are damaged."""

    def __init__(self, path: Path, *, skip_damaged: bool = False) -> None:
        self.path, self._skip_damaged = path, skip_damaged
        self.lines: list[dict[str, Any]] = []
        self.size = 0  # bytes of whole lines
        self.damaged = 0  # lines that were skipped
        if path.exists():
            self._read()

    @property
    def epochs(self) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["type"] == "epoch"]

    @property
    def end(self) -> dict[str, Any] | None:
        return self.lines[-1] if self.lines and self.lines[-1]["type"] == "end" else None

    def append(self, line: dict[str, Any]) -> None:
        data = json.dumps(line, allow_nan=False).encode() + b"\n"
        try:
            with open(self.path, "ab") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            self._truncate(self.size)  # to make a file shorter needs no room
            raise self._not_written(error) from error
        self.lines.append(line)
        self.size += len(data)

    def describe(self) -> dict[str, Any]:
        """Size and checksum of the whole lines: {"bytes": ..., "sha256": ...}."""
        return {"bytes": self.size, "sha256": self._checksum(self.size)}

    def _checksum(self, size: int) -> str:
        data = self.path.read_bytes()[:size] if self.path.exists() else b""
        return hashlib.sha256(data).hexdigest()

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

    def _not_written(self, error: OSError) -> OSError:
        return OSError(
            f"{self.path} could not be written: {error.strerror}; what was saved before is whole: "
            "make room and run again with --resume"
        )


def read_record(path: Path | str) -> list[dict[str, Any]]:
    """The lines of a record (or of the one in a run's folder), less a last one that is not whole."""
    path = Path(path)
    lines, errors, _ = _read(path / RECORD if path.is_dir() else path)
    if errors:
        raise errors[0]
    return lines


def lines_so_far(folder: Path) -> list[dict[str, Any]]:
    """The record of a run that may not have begun, or that another process is writing: what can be read of it now."""
    try:
        return read_record(folder / RECORD)
    except (OSError, ValueError):
        return []


def _read(path: Path) -> tuple[list[dict[str, Any]], list[ValueError], int]:
    """The lines that are records, an error for each that is not, and the bytes of all that are whole."""
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    lines, errors = [], []
    for number, text in enumerate(whole.splitlines(), start=1):
        try:
            line = json.loads(text)
            sound = isinstance(line["type"], str) and (line["type"] != "end" or isinstance(line["status"], str))
        except (ValueError, TypeError, KeyError):
            sound = False
        if not sound:
            errors.append(
                ValueError(
                    f"{path} is damaged in line {number}: {text[:60]!r} is not a record; mend the line, or remove "
                    f"{path.parent} and train the run again"
                )
            )
        else:
            lines.append(line)
    return lines, errors, len(whole)
