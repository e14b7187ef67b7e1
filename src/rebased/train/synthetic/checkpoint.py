"""The state of a run on disk: always one whole checkpoint, and a pointer that says which file it is.

checkpoint-<step>.pt is written first, then checkpoint.json, which names it with its checksum, then the former
checkpoint goes. A process that is killed in between leaves the former one in force.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from rebased.files import PARTIAL, replacing

POINTER = "checkpoint.json"
FORMAT = 1
REMEDY = "restore the file, or start the run again in another folder"


def save_checkpoint(folder: Path, state: dict[str, Any], *, digest: str, epoch: int, step: int) -> None:
    """`state` is made of tensors and plain types, so that it can be read without trusting it."""
    path = folder / f"checkpoint-{step}.pt"
    try:
        with replacing(path) as file:
            torch.save({"format": FORMAT, "digest": digest} | state, file)
        pointer = {
            "format": FORMAT,
            "file": path.name,
            "sha256": _sha256(path),
            "bytes": path.stat().st_size,
            "epoch": epoch,
            "step": step,
            "digest": digest,
        }
        with replacing(folder / POINTER) as file:
            file.write(json.dumps(pointer, indent=2).encode() + b"\n")
    except OSError as error:
        former = read_pointer(folder)
        kept = f"the one of step {former['step']} is whole" if former else "there is no earlier one"
        _delete_all_but(folder, former["file"] if former else None)
        raise OSError(
            f"{path} could not be saved: {error.strerror or error}; {kept}: make room and run again with --resume"
        ) from error
    _delete_all_but(folder, path.name)


def load_checkpoint(folder: Path, digest: str) -> dict[str, Any] | None:
    """The state that was saved last, or None where there is none yet."""
    pointer = read_pointer(folder)
    if pointer is None:
        return None
    path = folder / pointer["file"]
    if not path.exists():
        raise ValueError(f"{path} is missing, though {POINTER} names it; {REMEDY}")
    if path.stat().st_size != pointer["bytes"]:
        raise ValueError(
            f"{path} is damaged: it has {path.stat().st_size} bytes and was saved with {pointer['bytes']}; {REMEDY}"
        )
    if _sha256(path) != pointer["sha256"]:
        raise ValueError(f"{path} is damaged: its checksum is not the one in {POINTER}; {REMEDY}")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # pickle, zip and torch each have their own
        raise ValueError(f"{path} is not a checkpoint that torch can read safely; {REMEDY}") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise ValueError(f"{path} is not a checkpoint of format {FORMAT}, which this version reads; {REMEDY}")
    if state["digest"] != digest or pointer["digest"] != digest:
        raise ValueError(f"{path} belongs to another run, {state['digest']}; this one is {digest}; {REMEDY}")
    return state


def read_pointer(folder: Path) -> dict[str, Any] | None:
    path = folder / POINTER
    if not path.exists():
        return None
    try:
        pointer = json.loads(path.read_bytes())
        if Path(pointer["file"]).name != pointer["file"]:
            raise ValueError("it names a file outside of this folder")
        return {key: pointer[key] for key in ("file", "sha256", "bytes", "epoch", "step", "digest")}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged: {error!r}; {REMEDY}") from error


def _delete_all_but(folder: Path, keep: str | None) -> None:
    for path in [*folder.glob("checkpoint-*.pt"), *folder.glob(f".*{PARTIAL}")]:
        if path.name != keep:
            path.unlink(missing_ok=True)


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
