"""Checkpoints: always one whole checkpoint, and a pointer to it.

A checkpoint is a file or a folder named checkpoint-<step>, written by the workload. checkpoint.json, the pointer, is
written after it and names every file with its checksum. It also holds the run's progress, and the size and checksum of
the record at that moment. The former checkpoint is deleted last. A process that is killed in between leaves the former
one in force. Nothing is deleted before another checkpoint was found whole.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from rebased.files import NotSaved, describe_file, read_json, replacing, seal, unseal
from rebased.train.world import World

POINTER = "checkpoint.json"
FORMAT = 2
REMEDY = "restore it, or start the run again in another folder"


class Pointer(NamedTuple):
    """What checkpoint.json says."""

    step: int
    digest: str  # of the run
    name: str  # of the file or folder with the tensors
    files: dict[str, dict[str, Any]]  # path below the run's folder: {"bytes": ..., "sha256": ...}
    progress: dict[str, Any] | None  # None: an older format, where the tensors' file holds it
    record: dict[str, Any] | None  # {"bytes": ..., "sha256": ...} of the record; sha256 None: an older format


def save_checkpoint(
    folder: Path,
    write: Callable[[Path], list[Path]],
    world: World,
    *,
    suffix: str,
    digest: str,
    progress: dict[str, Any],
    record: dict[str, Any],
) -> None:
    """Write a checkpoint of progress["step"], point to it, and delete the former one.

    write: writes this process's tensors to a path and returns the files that it wrote.
    suffix: of the path: ".pt" for a file, "" for a folder.
    record: {"bytes": ..., "sha256": ...} of the record as it is now.
    """
    path = folder / f"checkpoint-{progress['step']}{suffix}"

    def write_files() -> dict[str, Any]:
        try:
            return {str(file.relative_to(folder)): describe_file(file) for file in write(path)}
        except (OSError, RuntimeError) as error:
            raise _not_saved(folder, path, error) from error

    def point(files: dict[str, Any]) -> None:
        if world.is_rank_zero:
            about = {
                "format": FORMAT,
                "step": progress["step"],
                "digest": digest,
                "name": path.name,
                "files": files,
                "progress": progress,
                "record": record,
            }
            try:
                with replacing(folder / POINTER) as file:
                    file.write(json.dumps(seal(about), indent=2).encode() + b"\n")
            except OSError as error:
                raise _not_saved(folder, path, error) from error
            delete_others(folder, path.name)

    if world.is_rank_zero:
        _delete(path)  # left by a process that was killed while it wrote
    parts = world.gather(world.together(write_files))
    world.together(lambda: point({name: about for part in parts for name, about in part.items()}))


def find_checkpoint(folder: Path, world: World, *, digest: str) -> tuple[Pointer, Path] | None:
    """The pointer and the path of the checkpoint, after every checksum was compared; None: there is none yet."""

    def check() -> Pointer | None:
        pointer = read_pointer(folder)
        if pointer is None:
            return None
        if pointer.digest != digest:
            raise ValueError(
                f"{folder / pointer.name} belongs to another run, {pointer.digest}; this one is {digest}; {REMEDY}"
            )
        if world.is_rank_zero:
            _check_files(folder, pointer)
        return pointer

    pointer = world.together(check)
    return None if pointer is None else (pointer, folder / pointer.name)


def read_pointer(folder: Path) -> Pointer | None:
    """What checkpoint.json says; None where there is no such file. ValueError where it is damaged."""
    path = folder / POINTER
    if not path.exists():
        return None
    try:
        pointer = _parse(read_json(path))
        names = [Path(name) for name in (pointer.name, *pointer.files)]
        if any(name.is_absolute() or ".." in name.parts for name in names):
            raise ValueError("it names a file outside of this folder")
        if not pointer.files or any(name.parts[0] != pointer.name for name in names):
            raise ValueError("it does not name the files of its checkpoint")
        return pointer
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = str(error).removeprefix(f"{path} ") if isinstance(error, ValueError) else repr(error)
        raise ValueError(f"{path} is damaged: {reason}; {REMEDY}") from error


def _parse(tree: dict[str, Any]) -> Pointer:
    """The pointer in a file of this or an older format."""
    if tree["format"] == FORMAT:
        if "sha256" not in tree:
            raise ValueError("it has no checksum")
        return Pointer(**{key: unseal(tree)[key] for key in Pointer._fields})
    if tree["format"] == 1:  # of synthetic runs, until version 0.1
        about = {"bytes": tree["bytes"], "sha256": tree["sha256"]}
        return Pointer(tree["step"], tree["digest"], tree["file"], {tree["file"]: about}, None, None)
    if tree["format"] == "text-1":  # of language models, until version 0.1
        files = {f"{tree['folder']}/{name}": about for name, about in tree["files"].items()}
        progress = dict(tree["progress"])
        record = {"bytes": progress.pop("record_bytes"), "sha256": None}
        progress["loss"] = progress.pop("nats")
        return Pointer(progress["step"], tree["digest"], tree["folder"], files, progress, record)
    raise ValueError(f"it is of format {tree['format']}, and this version reads {FORMAT}")


def _check_files(folder: Path, pointer: Pointer) -> None:
    for name, about in pointer.files.items():
        path = folder / name
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
    if former is None:
        _delete(path)
    else:
        delete_others(folder, former.name)
    reason = str(getattr(error, "strerror", None) or error).splitlines()[0]
    return NotSaved(f"{path} could not be saved: {reason}; {kept}: make room, then resume the run")


def delete_others(folder: Path, keep: str) -> None:
    """Delete all checkpoints but the one of this name, which must be whole, and what killed processes left."""
    for path in [*folder.glob("checkpoint-*"), *folder.glob(".checkpoint-*")]:
        if path.name != keep:
            _delete(path)


def _delete(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
