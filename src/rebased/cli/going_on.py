"""What to type when a run was interrupted, for every command that trains one."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from rebased.train.folder import CONFIG


def go_on_with(verb: str, folder: Path, imports: Sequence[str]) -> str:
    """`imports` are what --import named."""
    words = ["--config", str(folder / CONFIG), "--out", str(folder), "--resume"]
    words += [word for name in imports for word in ("--import", name)]
    return f"go on with: rebased {verb} {shlex.join(words)}"
