"""What was measured on a trained model after its run: evaluations.jsonl in the run's folder, one line each."""

import json
from pathlib import Path
from typing import Any

from rebased.files import locked, replacing

EVALUATIONS = "evaluations.jsonl"
MOST_BYTES = 2**24
"""The largest file that is read."""


def append_evaluation(folder: Path, entry: dict[str, Any]) -> Path:
    """Add one measurement. The file is replaced as a whole, so that a line is there or not. Returns the file."""
    path = folder / EVALUATIONS
    with locked(folder):
        before = path.read_bytes() if path.exists() else b""
        with replacing(path) as file:
            file.write(before + json.dumps(entry, allow_nan=False).encode() + b"\n")
    return path


def read_evaluations(folder: Path) -> list[dict[str, Any]]:
    """The measurements of a run, oldest first; empty if there are none."""
    path = folder / EVALUATIONS
    if not path.is_file():
        return []
    if path.stat().st_size > MOST_BYTES:
        raise ValueError(f"{path} has {path.stat().st_size:,} bytes; at most {MOST_BYTES:,} are read")
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}, line {number}, is not JSON: {error}; remove the line") from error
        if not isinstance(entry, dict) or "type" not in entry:
            raise ValueError(f"{path}, line {number}, is not a measurement; remove the line")
        found.append(entry)
    return found
