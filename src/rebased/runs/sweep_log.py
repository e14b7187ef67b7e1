"""sweep.jsonl: what a sweep's folder was asked for and which runs failed, a line an event.

What a run did stands in its own record. Here stand its failures, which say more about the machine than about the run:
a run that failed may be tried again and then succeed.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rebased.runs.folder import locked
from rebased.runs.provenance import describe_code
from rebased.runs.record import Record

LOG = "sweep.jsonl"
PROMISED: dict[str, dict[str, type]] = {
    "sweep": {"runs": list},
    "failed": {"digest": str, "error": str},
    "retry": {"digest": str},
}


def is_whole(line: dict[str, Any]) -> bool:
    """Whether a line has what its type promises."""
    promised = PROMISED.get(line["type"], {})
    kept = all(isinstance(line.get(key), kind) for key, kind in promised.items())
    return kept and all(isinstance(digest, str) for digest in line.get("runs", ()))


class SweepLog:
    def __init__(self, folder: Path) -> None:
        self._record = Record(folder / LOG, skip_damaged=True)

    @property
    def _lines(self) -> list[dict[str, Any]]:
        return [line for line in self._record.lines if is_whole(line)]

    @property
    def damaged(self) -> int:
        """Lines that could not be read. Failures that they told of are forgotten: such runs are tried again."""
        return self._record.damaged + len(self._record.lines) - len(self._lines)

    @property
    def failures(self) -> dict[str, str]:
        """The errors of runs that failed and have not been tried again, by digest."""
        errors: dict[str, str] = {}
        for line in self._lines:
            if line["type"] == "failed":
                errors[line["digest"]] = line["error"]
            elif line["type"] == "retry":
                errors.pop(line["digest"], None)
        return errors

    def begin(self, source: Path, digests: Sequence[str]) -> None:
        self._record.rewind(self._record.size)  # less a line that was torn off in the writing
        self._record.append({"type": "sweep", "file": source.name, "code": describe_code(), "runs": list(digests)})

    def failed(self, digest: str, error: str) -> None:
        self._record.append({"type": "failed", "digest": digest, "error": error})

    def retry(self, digest: str) -> None:
        self._record.append({"type": "retry", "digest": digest})


def check_folder(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; choose a folder (--out)")
    names = [name for name in os.listdir(folder) if not name.startswith(".")] if folder.exists() else []
    if names and LOG not in names:
        raise ValueError(f"{folder} is not empty and not a sweep's (no {LOG}); choose another folder (--out)")


@contextmanager
def sweep_folder(folder: Path) -> Iterator[SweepLog]:
    """Within the block the folder is this sweep's alone. Refused if another sweep is under way in it, or if it holds
    something else."""
    check_folder(folder)
    with locked(folder):
        check_folder(folder)  # again: another process may have come and gone since
        yield SweepLog(folder)
