"""The user's own mixers and tasks: a record holds a checksum of each, which shows whether its file was changed.

A run's digest says nothing about code: a mixer that was changed keeps its name and its arguments.
"""

import hashlib
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rebased.mixers.checks import is_own
from rebased.runs.run_config import RunConfig

KEY = "own_code"
"""The key of the checksums in a record's lines of type "run" and "resume"."""


def own_code(config: RunConfig) -> dict[str, str]:
    """{"mixer 'own'": checksum} for each mixer and the task of a run that is not of this package."""
    own: dict[str, type] = {f"mixer {name!r}": cls for name, cls in config.model.own_mixers().items()}
    own |= {what: cls for what, cls in config.classes().items() if is_own(cls)}
    return {what: found for what, cls in own.items() if (found := checksum(cls))}


def checksum(cls: type) -> str | None:
    """A checksum of the file in which a class stands, or of the class alone if it has no file. Empty lines, lines of
    comments and blanks at the end of a line do not count. None if there is no source."""
    try:
        source = Path(inspect.getfile(cls)).read_text(encoding="utf-8")
    except (OSError, TypeError, UnicodeDecodeError):  # typed into a notebook, or a file that is gone
        try:
            source = inspect.getsource(cls)
        except (OSError, TypeError):
            return None
    lines = [line.rstrip() for line in source.splitlines()]
    code = "\n".join(line for line in lines if line and not line.lstrip().startswith("#"))
    return hashlib.sha256(code.encode()).hexdigest()[:16]


def recorded_code(lines: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The newest checksums in a record; empty if it has none. The record may be a stranger's."""
    for line in reversed(lines):
        if line.get("type") in ("run", "resume") and isinstance(found := line.get(KEY), dict):
            return {what: value for what, value in found.items() if isinstance(value, str)}
    return {}


def changed_code(lines: Sequence[Mapping[str, Any]], config: RunConfig) -> list[str]:
    """What has changed since a run was trained: ["mixer 'own'"]."""
    before, now = recorded_code(lines), own_code(config)
    return [what for what in now if before.get(what, now[what]) != now[what]]
