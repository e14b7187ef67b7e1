"""Messages about interrupted runs, with the command that resumes them."""

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from rebased.runs.folder import CONFIG

AT_ONCE = "ended at once; resume the runs in progress from their last checkpoints with"


def being_saved(runs: int, *, time_is_up: bool = False) -> str:
    """The message after Ctrl-C, or when the time is up, while `runs` runs are being saved, which can take seconds."""
    are, them = ("1 run is", "it") if runs == 1 else (f"{runs} runs are", "them")
    why, again = ("time is up", "Ctrl-C") if time_is_up else ("stopping", "Ctrl-C again")
    return f"{why}: {are} being saved; {again} ends {them} at once, without saving"


def ended_at_once(verb: str, folder: Path, imports: Sequence[str]) -> str:
    """The message after a second Ctrl-C, which does not wait until the run is saved."""
    if not (folder / CONFIG).exists():
        return "ended at once; nothing was written yet"
    return f"ended at once; to resume from the last checkpoint, {continue_with(verb, folder, imports)}"


def nothing_to_resume(folder: Path) -> str | None:
    """What --resume says if the folder has no run; None if it has one. Of several processes one says it."""
    if (folder / CONFIG).exists() or os.environ.get("RANK", "0") != "0":
        return None
    return f"there is no run in {folder} to resume: this begins a new one"


def continue_with(verb: str, folder: Path, imports: Sequence[str]) -> str:
    """How to resume the run in a folder: "continue with: rebased ...". `imports` are the values of --import."""
    words = ["--config", str(folder / CONFIG), "--out", str(folder), "--resume"]
    words += [word for name in imports for word in ("--import", name)]
    return f"continue with: rebased {verb} {shlex.join(words)}"
