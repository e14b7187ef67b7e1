"""What is said when a run is interrupted, and what to type then, for every command that trains."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from rebased.runs.folder import CONFIG

AT_ONCE = "ended at once; runs that were under way go on from their last checkpoints"


def being_saved(runs: int) -> str:
    """Said as soon as Ctrl-C has come: to save can take seconds."""
    are, them = ("1 run is", "it") if runs == 1 else (f"{runs} runs are", "them")
    return f"stopping: {are} being saved; Ctrl-C again ends {them} at once, to go on from the last checkpoint"


def ended_at_once(verb: str, folder: Path, imports: Sequence[str]) -> str:
    """After a second Ctrl-C, which does not wait until the run is saved."""
    if not (folder / CONFIG).exists():
        return "ended at once; nothing was written yet"
    return f"ended at once; from the last checkpoint {go_on_with(verb, folder, imports)}"


def go_on_with(verb: str, folder: Path, imports: Sequence[str]) -> str:
    """`imports` are what --import named."""
    words = ["--config", str(folder / CONFIG), "--out", str(folder), "--resume"]
    words += [word for name in imports for word in ("--import", name)]
    return f"go on with: rebased {verb} {shlex.join(words)}"
