"""The folder of a preparation: it holds one preparation, and one process at a time works in it."""

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rebased.config import Config
from rebased.data.manifest import MANIFEST, Manifest, Shard, read_manifest, verify_file
from rebased.files import LOCK, PARTIAL, locked, replacing, seal, unseal

STATE = ".prepare.json"
SHARD = re.compile(r".+-\d{5,}\.(bin|ends)")


class State(Config):
    """What a preparation has finished. Rewritten after each shard, and kept so that a folder can be recognised."""

    plan: dict[str, Any]  # everything that decides the result
    shards: tuple[dict[str, Shard], ...] = ()  # the finished shards by split
    invalid_utf8: int = 0
    source_bytes: int = 0


@contextmanager
def preparation_folder(folder: Path, plan: dict[str, Any], resume: bool) -> Iterator[tuple[State, Manifest | None]]:
    """Hold the folder of a preparation during the block and yield (its state, its manifest if it is finished).

    The folder may be new, empty, of the same plan with `resume`, or of another plan that has not finished a shard.
    Raises ValueError for any other folder, and changes nothing in it.
    """
    _check_folder(folder, plan, resume)
    with locked(folder, option="-o"):
        state = _check_folder(folder, plan, resume)  # again: another process may have used it before the lock was taken
        if (folder / MANIFEST).exists():
            yield state, read_manifest(folder)
            return
        for partial in folder.glob(f".*{PARTIAL}"):  # left by a process that was killed
            partial.unlink()
        if not state.shards:  # those of a plan that could not succeed, or of a process that was killed
            for stale in (path for path in folder.iterdir() if SHARD.fullmatch(path.name)):
                stale.unlink()
        for shard in (shard for shards in state.shards for shard in shards.values()):
            verify_file(folder, shard.token_file)
            verify_file(folder, shard.ends_file)
        write_state(folder, state)
        yield state, None


def _check_folder(folder: Path, plan: dict[str, Any], resume: bool) -> State:
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; choose a folder (-o)")
    path = folder / STATE
    if not path.exists():
        ours = (LOCK, f".{STATE}{PARTIAL}")  # all that a process leaves which was killed before it had begun
        if folder.exists() and any(name not in ours for name in os.listdir(folder)):
            raise ValueError(f"{folder} is not empty and was not begun by this command; choose another folder (-o)")
        return State(plan=plan)
    try:
        state = State.model_validate(unseal(json.loads(path.read_bytes())))
    except (ValidationError, ValueError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged; remove {folder} and prepare it again") from error
    different = [key for key in plan if state.plan.get(key) != plan[key]]
    if different and not state.shards:
        return State(plan=plan)  # most likely the first command had a mistake; nothing is lost
    if different:
        raise ValueError(
            f"{folder} holds another preparation: it differs in {' and '.join(different)}; choose another folder (-o)"
        )
    if not resume:
        raise ValueError(f"{folder} already holds this preparation; finish it with --resume, or choose another (-o)")
    return state


def write_state(folder: Path, state: State) -> None:
    """Replace the state file of a preparation. It has a checksum of itself: the manifest is made of it."""
    with replacing(folder / STATE) as file:
        file.write(json.dumps(seal(state.model_dump(mode="json"))).encode())
