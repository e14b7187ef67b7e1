"""sweep.jsonl: which runs a sweep asked for and which of them failed, one JSON object per line.

A run's results are in its own record. Failures are kept here, because they often come from the machine: a failed run
may succeed when it is tried again.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rebased.files import locked
from rebased.runs.folder import check_holds
from rebased.runs.provenance import describe_code
from rebased.runs.record import Record
from rebased.runs.record_schema import Part, fits

LOG = "sweep.jsonl"
PAGE = ("report.html", "cells.csv", "runs.csv", "recall-by-bytes.pdf")
"""What `rebased suite` writes before any run: a mixer may be trained there later."""


class _Sweep(Part):
    runs: list[str]


class _Failed(Part):
    digest: str
    error: str


class _Retry(Part):
    digest: str


SCHEMAS: dict[str, type[Part]] = {"sweep": _Sweep, "failed": _Failed, "retry": _Retry}


class SweepLog:
    """The log of the sweep in `folder`. Damaged lines are left out and counted."""

    def __init__(self, folder: Path) -> None:
        self._record = Record(folder / LOG, skip_damaged=True)

    @property
    def _lines(self) -> list[dict[str, Any]]:
        return [line for line in self._record.lines if fits(SCHEMAS.get(line["type"], Part), line)]

    @property
    def damaged(self) -> int:
        """How many lines could not be read. Runs whose failures they recorded are tried again."""
        return self._record.damaged + len(self._record.lines) - len(self._lines)

    @property
    def failures(self) -> dict[str, str]:
        """{digest: error} of the runs that failed and have not been tried again."""
        errors: dict[str, str] = {}
        for line in self._lines:
            if line["type"] == "failed":
                errors[line["digest"]] = line["error"]
            elif line["type"] == "retry":
                errors.pop(line["digest"], None)
        return errors

    @property
    def asked(self) -> set[str]:
        """The digests of all runs that the sweep has planned."""
        return {digest for line in self._lines if line["type"] == "sweep" for digest in line["runs"]}

    def begin(self, source: Path, digests: Sequence[str]) -> None:
        """Append a line for a sweep that begins: the name of its file and the digests of its runs."""
        self._record.rewind(self._record.size)  # removes an incomplete last line
        self._record.append({"type": "sweep", "file": source.name, "code": describe_code(), "runs": list(digests)})

    def failed(self, digest: str, error: str) -> None:
        """Append a line for a run that failed."""
        self._record.append({"type": "failed", "digest": digest, "error": error})

    def retry(self, digest: str) -> None:
        """Append a line for a failed run that is tried again; it no longer counts as failed."""
        self._record.append({"type": "retry", "digest": digest})


def check_folder(folder: Path) -> None:
    """Raise ValueError unless `folder` is new, empty, a sweep's, or holds nothing but the page of a suite."""
    check_holds(folder, LOG, "a sweep's", besides=PAGE)


@contextmanager
def sweep_folder(folder: Path) -> Iterator[SweepLog]:
    """Hold the folder of a sweep during the block and yield its log; the folder is made if needed.

    Raises ValueError if another process works in the folder, or if it holds something else than a sweep.
    """
    check_folder(folder)
    with locked(folder):
        check_folder(folder)  # again: another process may have used the folder before the lock was taken
        yield SweepLog(folder)
