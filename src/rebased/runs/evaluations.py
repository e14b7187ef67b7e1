"""What was measured on a trained model after its run: evaluations.jsonl in the run's folder, one line each.

Of a shipped model it is in the working folder.
"""

import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rebased.files import locked, replacing
from rebased.runs.record import RECORD, read_record, scan

logger = logging.getLogger("rebased")

EVALUATIONS = "evaluations.jsonl"


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
    found = [line for _, line in scan(path)]
    if None in found:
        raise ValueError(f"{path}, line {found.index(None) + 1}, is not a measurement; remove the line")
    return [line for line in found if line is not None]


def collect_task_scores(paths: Iterable[Path]) -> dict[str, dict[str, float]]:
    """The newest score of each task, "task: metric", by the digest of the run, in these folders at any depth.

    A file that cannot be read is left out with a warning.
    """
    found: dict[str, dict[str, float]] = {}
    for path in paths:
        for file in sorted(path.rglob(EVALUATIONS)) if path.is_dir() else ():
            if not (file.parent / RECORD).is_file():
                continue  # of a shipped model, which is no run
            try:
                digest = read_record(file.parent)[0]["digest"]
                entries = [entry for entry in read_evaluations(file.parent) if entry["type"] == "tasks"]
                scores = {
                    f"{s['task']}: {s['metric']}": float(s["value"]) for entry in entries for s in entry["scores"]
                }
            except (ValueError, OSError, LookupError, TypeError) as error:
                logger.warning("%s is left out: %s", file, error)
                continue
            found.setdefault(digest, {}).update(scores)
    return found
