"""Files on disk: atomic writes, folder locks, checksums, and reading within limits."""

import hashlib
import json
import math
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TextIO

try:
    import fcntl
except ImportError:  # Windows
    import msvcrt

    def _set_lock(file: TextIO, held: bool) -> None:
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK if held else msvcrt.LK_UNLCK, 1)  # type: ignore[attr-defined]
else:

    def _set_lock(file: TextIO, held: bool) -> None:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB if held else fcntl.LOCK_UN)


PARTIAL = ".partial"
LOCK = ".lock"
JSON_BYTES = 2**26
"""The largest JSON file that `read_json` takes: manifests of ten thousands of shards are below it."""
JSON_DEPTH = 64
"""The deepest nesting that `parse_json` takes; ours have at most ten levels."""


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A binary file to write, which becomes `path` when the block ends. On any error `path` stays as it was.

    Until then the content is in a temporary file beside `path`, named .NAME.partial.
    """
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
    """Write a folder's entries to disk: without this a power cut may undo a rename."""
    if not hasattr(os, "O_DIRECTORY"):  # Windows opens no folders
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class NotSaved(OSError):
    """A file of a run could not be written. What was saved before is whole: the run can be resumed."""


class FolderInUse(ValueError):
    """Another process holds the lock of a folder."""


@contextmanager
def locked(folder: Path, *, option: str = "--out") -> Iterator[None]:
    """Hold the lock of `folder` during the block; the folder is made if needed.

    Raises `FolderInUse` if another process holds the lock. `option` is the command-line option that chooses the folder,
    for the message.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / LOCK, "a") as lock:
        try:
            _set_lock(lock, True)  # the system frees it when the process ends in any way
        except OSError as error:
            raise FolderInUse(
                f"{folder} is in use by another process; wait until it ends, or choose another folder ({option})"
            ) from error
        try:
            yield
        finally:
            _set_lock(lock, False)  # Windows frees it some time after the file is closed


def describe_file(path: Path) -> dict[str, Any]:
    """{"bytes": the size of a file, "sha256": its checksum}: enough to recognise its content."""
    return {"bytes": path.stat().st_size, "sha256": sha256_file(path)}


def sha256_file(path: Path) -> str:
    """The SHA-256 of a file's content, as 64 hexadecimal digits. The file is read in pieces, never as a whole."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_bytes(content: bytes) -> str:
    """The SHA-256 of `content`, as 64 hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


def seal(tree: dict[str, Any]) -> dict[str, Any]:
    """JSON data with a checksum of itself, under the key "sha256"."""
    return {**tree, "sha256": sha256_bytes(json.dumps(tree, sort_keys=True).encode())}


def unseal(tree: dict[str, Any]) -> dict[str, Any]:
    """What `seal` was given. Raises ValueError if it was changed since, or has no checksum."""
    content = {key: value for key, value in tree.items() if key != "sha256"}
    if "sha256" not in tree:
        raise ValueError("it has no checksum")
    if seal(content) != tree:
        raise ValueError("its checksum is not that of its contents")
    return content


def refuse_pipe(path: Path | str) -> os.stat_result:
    """The state of a file or a folder. Raises ValueError if it is a device, a pipe or a socket, which may never end."""
    state = os.stat(path)
    if not stat.S_ISREG(state.st_mode) and not stat.S_ISDIR(state.st_mode):
        raise ValueError(f"{path} is a device, a pipe or a socket; give a regular file")
    return state


def read_bounded(path: Path | str, limit: int) -> bytes:
    """The content of a regular file of at most `limit` bytes.

    Raises ValueError if the file is larger, or a device or a pipe, which may never end; OSError if it cannot be read.
    """
    state = refuse_pipe(path)
    with open(path, "rb") as file:
        content = file.read(limit + 1) if state.st_size <= limit else b""
    if state.st_size > limit or len(content) > limit:
        raise ValueError(f"{path} has {max(state.st_size, len(content)):,} bytes; at most {limit:,} are read here")
    return content


def read_json(path: Path | str, limit: int = JSON_BYTES) -> Any:
    """The value in a JSON file of at most `limit` bytes. Raises ValueError, as `read_bounded` and `parse_json` do."""
    return parse_json(read_bounded(path, limit), str(path))


def parse_json(content: bytes | str, source: str) -> Any:
    """The value of a JSON text. Raises ValueError, which names `source`, if it is no JSON or nested too deep."""
    try:
        value = json.loads(content)
    except RecursionError:
        raise ValueError(f"{source} is nested deeper than {JSON_DEPTH} levels") from None
    except ValueError as error:  # also of bytes that are not UTF-8, and of numbers with thousands of digits
        raise ValueError(f"{source} is not JSON: {error}") from error
    level, depth = [value], 0
    while level := [child for each in level if isinstance(each, dict | list) for child in _children(each)]:
        depth += 1
        if depth > JSON_DEPTH:
            raise ValueError(f"{source} is nested deeper than {JSON_DEPTH} levels")
    return value


def without_nan(value: Any) -> Any:
    """JSON data with None instead of nan and infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {key: without_nan(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _children(value: dict[str, Any] | list[Any]) -> Iterator[Any]:
    yield from value.values() if isinstance(value, dict) else value
