"""The folder of a preparation: one preparation, one process at a time; what is finished is kept."""

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rebased.config import Config
from rebased.data.manifest import MANIFEST, Manifest, Shard, read_manifest, verify_file
from rebased.files import PARTIAL, replacing

STATE, LOCK = ".prepare.json", ".lock"
SHARD = re.compile(r".+-\d{5,}\.(bin|ends)")


class State(Config):
    """What is finished, rewritten after each shard. It stays, to tell one preparation from another."""

    plan: dict[str, Any]
    shards: tuple[dict[str, Shard], ...] = ()
    invalid_utf8: int = 0
    source_bytes: int = 0


@contextmanager
def own_folder(folder: Path, plan: dict[str, Any], resume: bool) -> Iterator[tuple[State, Manifest | None]]:
    """(what is finished, the manifest if all is). Refused, and left as it was, unless the folder is new, empty, this
    preparation's own, or that of another one which has not finished a single shard."""
    _check_folder(folder, plan, resume)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / LOCK, "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # goes with the process, however it ends
        except OSError as error:
            raise ValueError(f"{folder} is in use by another process; wait, or choose another folder") from error
        state = _check_folder(folder, plan, resume)  # again: another process may have come and gone since
        if (folder / MANIFEST).exists():
            yield state, read_manifest(folder)
            return
        for partial in folder.glob(f".*{PARTIAL}"):  # of a process that was killed
            partial.unlink()
        if not state.shards:
            for stale in (path for path in folder.iterdir() if SHARD.fullmatch(path.name)):  # see give_up
                stale.unlink()
        for shards in state.shards:
            for shard in shards.values():
                verify_file(folder, shard.token_file)
                verify_file(folder, shard.ends_file)
        write_state(folder, state)
        yield state, None


def _check_folder(folder: Path, plan: dict[str, Any], resume: bool) -> State:
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; choose a folder (-o)")
    path = folder / STATE
    if not path.exists():
        if folder.exists() and any(name != LOCK for name in os.listdir(folder)):
            raise ValueError(f"{folder} is not empty and was not begun by this command; choose another folder (-o)")
        return State(plan=plan)
    try:
        state = State.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise ValueError(f"{path} is damaged; remove {folder} and prepare it again") from error
    different = [key for key in plan if state.plan.get(key) != plan[key]]
    if different and not state.shards:
        return State(plan=plan)  # a mistake in the first command, most likely: nothing is lost
    if different:
        raise ValueError(f"{folder} was begun with another {' and '.join(different)}; choose another folder (-o)")
    if not resume:
        raise ValueError(f"{folder} holds this preparation; add --resume to go on, or choose another folder (-o)")
    return state


def give_up(folder: Path, state: State) -> None:
    """Count what is written as not finished: this plan can never make it whole, and another must find room."""
    write_state(folder, State(plan=state.plan))


def write_state(folder: Path, state: State) -> None:
    with replacing(folder / STATE) as file:
        file.write(state.model_dump_json().encode())
