"""Files that are whole or not there, whatever happens while they are written."""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

PARTIAL = ".partial"


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Write to a neighbour of `path` that takes its place in the end. On any error `path` stays what it was."""
    partial = path.with_name(f".{path.name}{PARTIAL}")
    try:
        with open(partial, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        _sync_folder(path.parent)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _sync_folder(folder: Path) -> None:
    """Without this a power cut may undo the renaming."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256_file(path: Path) -> str:
    """The SHA-256 checksum of a file, as hex digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def describe_file(path: Path) -> dict[str, Any]:
    """Size and checksum of a file: {"bytes": ..., "sha256": ...}."""
    return {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
