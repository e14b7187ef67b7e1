"""Checkpoints: always one whole checkpoint, and a pointer to it.

A checkpoint is the file checkpoint-<step>.pt with everything that a step changes (training_state.py). checkpoint.json,
the pointer, is written after it and has its checksum. It also holds the run's progress, and the size and checksum of
the record at that moment. The former checkpoint is deleted last. A process that is killed in between leaves the former
one in force. Nothing is deleted before another checkpoint was found whole.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rebased.files import NotSaved, describe_file, read_json, replacing, seal, unseal
from rebased.train.world import World

POINTER = "checkpoint.json"
FORMAT = 3  # of the pointer and of the file
REMEDY = "restore it, or start the run again in another folder"


class Pointer(NamedTuple):
    """What checkpoint.json says."""

    step: int
    digest: str  # of the run
    name: str  # of the file
    file: dict[str, Any]  # {"bytes": ..., "sha256": ...} of the file
    progress: dict[str, Any]
    record: dict[str, Any]  # {"bytes": ..., "sha256": ...} of the record


def save_checkpoint(
    folder: Path,
    state: dict[str, Any],
    world: World,
    *,
    digest: str,
    progress: dict[str, Any],
    record: dict[str, Any],
) -> None:
    """Write a checkpoint of progress["step"], point to it, and delete the former one. Rank 0 writes.

    state: what training_state.py has collected.
    record: {"bytes": ..., "sha256": ...} of the record as it is now.
    """
    path = folder / f"checkpoint-{progress['step']}.pt"

    def write() -> None:
        if not world.is_rank_zero:
            return
        try:
            with replacing(path) as file:
                torch.save({"format": FORMAT, **state}, file)
            pointer = Pointer(progress["step"], digest, path.name, describe_file(path), progress, record)
            with replacing(folder / POINTER) as file:
                file.write(json.dumps(seal({"format": FORMAT, **pointer._asdict()}), indent=2).encode() + b"\n")
        except (OSError, RuntimeError) as error:
            raise _not_saved(folder, path, error) from error
        delete_others(folder, path.name)

    world.together(write)


def find_checkpoint(folder: Path, world: World, *, digest: str) -> Pointer | None:
    """The pointer to the checkpoint, after its checksum was compared; None: there is no checkpoint yet."""

    def check() -> Pointer | None:
        pointer = read_pointer(folder)
        if pointer is None:
            return None
        if pointer.digest != digest:
            raise ValueError(
                f"{folder / pointer.name} belongs to another run, {pointer.digest}; this one is {digest}; {REMEDY}"
            )
        if world.is_rank_zero:
            _check_file(folder / pointer.name, pointer.file)
        return pointer

    return world.together(check)


def read_pointer(folder: Path) -> Pointer | None:
    """What checkpoint.json says; None where there is no such file. ValueError where it is damaged."""
    path = folder / POINTER
    if not path.exists():
        return None
    try:
        tree = read_json(path)
        if tree["format"] != FORMAT:
            raise ValueError(f"it is of format {tree['format']}, and this version reads {FORMAT}")
        if "sha256" not in tree:
            raise ValueError("it has no checksum")
        about = unseal(tree)
        pointer = Pointer(**{key: about[key] for key in Pointer._fields})
        if Path(pointer.name).name != pointer.name:
            raise ValueError("it names a file outside of this folder")
        return pointer
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = str(error).removeprefix(f"{path} ") if isinstance(error, ValueError) else repr(error)
        raise ValueError(f"{path} is damaged: {reason}; {REMEDY}") from error


def read_state(path: Path) -> dict[str, Any]:
    """What a checkpoint's file holds: tensors and plain types, so that it can be read without trusting it."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # pickle, zip and torch each have their own
        raise ValueError(f"{path} is not a checkpoint that torch can read safely; {REMEDY}") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise ValueError(f"{path} is not a checkpoint of format {FORMAT}, which this version reads; {REMEDY}")
    return state


def _check_file(path: Path, about: dict[str, Any]) -> None:
    if not path.exists():
        raise ValueError(f"{path} is missing, though {POINTER} names it; {REMEDY}")
    if path.stat().st_size != about["bytes"]:
        raise ValueError(
            f"{path} is damaged: it has {path.stat().st_size} bytes and was saved with {about['bytes']}; {REMEDY}"
        )
    if describe_file(path)["sha256"] != about["sha256"]:
        raise ValueError(f"{path} is damaged: its checksum is not the one in {POINTER}; {REMEDY}")


def _not_saved(folder: Path, path: Path, error: BaseException) -> NotSaved:
    """A full disk, with what is left and what to do."""
    former = read_pointer(folder)
    kept = f"the one of step {former.step} is whole" if former else "there is no earlier one"
    delete_others(folder, former.name if former else "")
    reason = str(getattr(error, "strerror", None) or error).splitlines()[0]
    return NotSaved(f"{path} could not be saved: {reason}; {kept}: make room, then resume the run")


def delete_others(folder: Path, keep: str) -> None:
    """Delete all checkpoints but the one of this name, which must be whole, and what killed processes left."""
    for path in [*folder.glob("checkpoint-*"), *folder.glob(".checkpoint-*")]:
        if path.name != keep:
            path.unlink(missing_ok=True)
