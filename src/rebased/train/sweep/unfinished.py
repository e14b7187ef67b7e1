"""Move unfinished runs to another machine: tar files with their folders, which a sweep there goes on with.

Per run the file holds config.yaml, record.jsonl, checkpoint.json and the checkpoint. A stranger's file can do no harm:
only these files are unpacked, with the checksums that checkpoint.json gives, into new folders of runs that the sweep
has planned; and a run reads its checkpoint without trusting it.
"""

import os
import re
import shutil
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path, PurePosixPath
from typing import BinaryIO, NamedTuple

from rebased.config import read_yaml
from rebased.files import describe_file, replacing, sha256_bytes
from rebased.runs.collect import ENDED
from rebased.runs.configs import parse_run
from rebased.runs.folder import CONFIG
from rebased.runs.record import RECORD, lines_so_far
from rebased.train.checkpoint import POINTER, Pointer, read_pointer
from rebased.train.sweep.plan import PlannedRun

SUFFIX = ".tar"
PART = "unfinished-"  # begins the names of the files in a folder
MOST = 4  # files in a folder
MIB = 2**20
TRIES = 3  # to open a checkpoint that a run replaces meanwhile
_NAME = re.compile(r"[\w.-]{1,100}", re.ASCII)  # of a file that every file system can hold
LARGEST = 2**31  # bytes that are unpacked of one file: more is no checkpoint of a sweep


class Moved(NamedTuple):
    """What was packed, or unpacked."""

    runs: int
    left: int  # runs that were not: no room, not wanted by the sweep, damaged, or further in the folder
    bytes: int


def archives(path: Path) -> list[Path]:
    """The files of unfinished runs at a path: the file itself, or those in a folder."""
    return sorted(path.glob(f"{PART}*{SUFFIX}")) if path.is_dir() else [path] if path.suffix == SUFFIX else []


def pack(runs: Iterable[PlannedRun], path: Path, limit: int) -> Moved:
    """Write the unfinished ones of these runs into tar files of at most `limit` bytes each; those that are furthest
    come first. A path without the suffix .tar is a folder, for up to MOST files. Older files of that name are
    replaced. The same runs give the same bytes. Runs may go on meanwhile."""
    one = path.suffix == SUFFIX
    places = [path] if one else [path / f"{PART}{number}{SUFFIX}" for number in range(1, MOST + 1)]
    packed: dict[Path, dict[str, BinaryIO]] = {place: {} for place in places}
    room, count, left = dict.fromkeys(places, limit - 2 * tarfile.RECORDSIZE), 0, 0
    with ExitStack() as held:
        found = [(checkpoint, run) for run in runs if (checkpoint := _hold(run.folder, held))]
        for (_, files), run in sorted(found, key=lambda pair: (-pair[0].step, pair[1].digest)):
            lines = lines_so_far(run.folder)
            if lines and lines[-1]["type"] == "end" and lines[-1]["status"] in ENDED:
                continue
            needed = sum(512 + -(-_size(file) // 512) * 512 for file in files.values()) if files else limit
            place = next((place for place, free in room.items() if needed <= free), None)
            if place is None:
                left += 1
                continue
            packed[place] |= {f"{run.digest}/{name}": file for name, file in files.items()}
            room[place] -= needed
            count += 1
        written = {place: files for place, files in packed.items() if files or one}
        for place, files in written.items():
            _write_archive(place, files)
    for older in set(archives(path)) - written.keys():
        older.unlink()
    return Moved(count, left, sum(place.stat().st_size for place in written))


class _Checkpoint(NamedTuple):
    """A run's checkpoint with its files, open: the run may replace them meanwhile. No files if one is missing."""

    step: int
    files: Mapping[str, BinaryIO]


def _hold(folder: Path, held: ExitStack) -> _Checkpoint | None:
    """Open the files of the run in a folder until `held` ends; None if there is no checkpoint."""
    pointer = _pointer_of(folder)
    for _ in range(TRIES):
        if pointer is None:
            return None
        with suppress(FileNotFoundError), ExitStack() as opened:
            names = (CONFIG, RECORD, POINTER, pointer.name)
            files: dict[str, BinaryIO] = {name: opened.enter_context(open(folder / name, "rb")) for name in names}
            if _pointer_of(folder) == pointer:  # so all files are of this checkpoint
                held.push(opened.pop_all())
                return _Checkpoint(pointer.step, files)
        pointer = _pointer_of(folder)
    return _Checkpoint(-1, {})


def _size(file: BinaryIO) -> int:
    return os.fstat(file.fileno()).st_size


def _write_archive(path: Path, files: Mapping[str, BinaryIO]) -> None:
    """Write files into a tar file under these names, without owners and times."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file, tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name, content in files.items():
            about = tarfile.TarInfo(name)
            about.size, about.mode = _size(content), 0o644
            archive.addfile(about, content)


def unpack(path: Path, runs: Sequence[PlannedRun], folder: Path, taken: dict[str, Path] | None = None) -> Moved:
    """Unpack the runs of a tar file that the sweep is to train. Raises ValueError if it is damaged.

    Of two checkpoints of one run the further one stays, be it from another file or in the folder before. `taken` has
    the files that runs were unpacked from, by digest. It is updated.
    """
    taken = {} if taken is None else taken
    wanted = {run.digest for run in runs if run.status in ("new", "begun")}
    unpacked = size = 0
    try:
        with tarfile.open(path, mode="r:") as archive:
            found = _by_run(archive)
            for digest, members in found.items():
                if digest in wanted and _write(folder / digest, archive, members):
                    taken[digest] = path
                    unpacked += 1
                    size += sum(member.size for member in members.values())
    except (tarfile.TarError, EOFError) as error:
        raise ValueError(f"{path} is not a file of unfinished runs, or is damaged ({error}); move it away") from error
    return Moved(unpacked, len(found) - unpacked, size)


def digests_in(path: Path) -> set[str]:
    """The digests of the runs in a tar file; empty if it cannot be read."""
    try:
        with tarfile.open(path, mode="r:") as archive:
            return {part for member in archive for part in PurePosixPath(member.name).parts[:1]}  # "." has none
    except (tarfile.TarError, EOFError):
        return set()


def _by_run(archive: tarfile.TarFile) -> dict[str, dict[str, tarfile.TarInfo]]:
    """The members of each run by file name. A member that is no file of a run is an error."""
    found: dict[str, dict[str, tarfile.TarInfo]] = {}
    total = 0
    for member in archive:
        digest, _, name = member.name.partition("/")
        if not member.isreg() or not _is_expected(name):
            raise tarfile.TarError(f"it holds {member.name!r}, which is no file of a run")
        if (total := total + member.size) > LARGEST:
            raise tarfile.TarError(f"it holds more than {LARGEST >> 30} GiB")
        found.setdefault(digest, {})[name] = member
    return found


def _is_expected(name: str) -> bool:
    """True for the names of a run's files: three fixed ones, and a checkpoint."""
    return name in (CONFIG, RECORD, POINTER) or (name.startswith("checkpoint-") and bool(_NAME.fullmatch(name)))


def _write(folder: Path, archive: tarfile.TarFile, members: Mapping[str, tarfile.TarInfo]) -> bool:
    """Write the files of a run into its new folder. False, and no folder, if they are not a whole checkpoint of it.
    A folder that is there is replaced if its checkpoint is not as far; else False."""
    beside, former = (folder.with_name(f".{folder.name}.{what}") for what in ("moved", "former"))
    if former.exists() and not folder.exists():  # a process was killed between the two renames below
        former.rename(folder)
    for path in (beside, former):
        shutil.rmtree(path, ignore_errors=True)
    try:
        beside.mkdir(parents=True)
        for name, member in members.items():
            content = archive.extractfile(member)
            (beside / name).write_bytes(content.read() if content else b"")
        if not _is_whole(beside, folder.name) or _step_of(beside) <= _step_of(folder):
            return False
        if folder.exists():
            folder.rename(former)
        beside.rename(folder)
        return True
    finally:
        if folder.exists():
            shutil.rmtree(former, ignore_errors=True)
        shutil.rmtree(beside, ignore_errors=True)


def _is_whole(folder: Path, digest: str) -> bool:
    """True if the folder holds a checkpoint of this run, and all its files are those that the pointer describes."""
    try:
        pointer = read_pointer(folder)
        if pointer is None or pointer.digest != digest or parse_run(read_yaml(folder / CONFIG)).digest() != digest:
            return False
        record = (folder / RECORD).read_bytes()[: pointer.record["bytes"]]
        if sha256_bytes(record) != pointer.record["sha256"]:
            return False
        return describe_file(folder / pointer.name) == pointer.file
    except (ValueError, OSError, KeyError, TypeError):
        return False


def _step_of(folder: Path) -> float:
    """The step of the checkpoint in a folder; -1 if there is none."""
    pointer = _pointer_of(folder)
    return pointer.step if pointer and isinstance(pointer.step, int) else -1


def _pointer_of(folder: Path) -> Pointer | None:
    """The pointer of the run in a folder; None if there is none, or it is damaged."""
    try:
        return read_pointer(folder)
    except ValueError:
        return None
