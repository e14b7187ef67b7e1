"""Collect runs from folders of runs and sweeps, from single records and from compressed bundles.

A bundle is a file of many records. Before each record there is a line of type "folder" with the name of the run's
folder. The suffix `.xz` or `.gz` says how the bundle is compressed. Damaged lines and impossible records are left out,
counted and named. Memory is bounded, whatever a file holds (record.py).
"""

import gzip
import hashlib
import json
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rebased.config import plain, plural
from rebased.files import replacing
from rebased.runs.finished import Run
from rebased.runs.record import CHANGED, OPENERS, RECORD, TooLarge, scan
from rebased.runs.record_schema import MAX_LINES, MAX_TEXT, check_run, is_whole, is_whole_epoch
from rebased.runs.sweep_log import LOG, SweepLog

ENDED = ("done", "diverged")  # the statuses of runs that have a result
MAX_NAMED = 100  # records that are named because they are left out; all are counted
BUNDLES = ("*.jsonl.gz", "*.jsonl.xz")
TORN = (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error, TooLarge)


@dataclass
class Collection:
    """The runs of one report, one per digest, and counts of what was left out."""

    runs: list[Run] = field(default_factory=list)  # on synthetic tasks
    lm_runs: list[Run] = field(default_factory=list)  # of language models
    files: int = 0
    damaged_lines: int = 0
    damaged_files: list[str] = field(default_factory=list)  # names of files with damaged lines, or that end too early
    nameless: int = 0  # records whose first line is damaged or missing
    other: int = 0  # records of another kind of run, or with settings that no run can have
    other_names: list[str] = field(default_factory=list)  # their folders, each with what is wrong with it
    repeated: int = 0  # further records of runs that were found already
    others: list[Run] = field(default_factory=list)  # of these, the ended ones that are no copy of what counts
    failures: dict[str, str] = field(default_factory=dict)  # errors that sweeps have logged, by digest
    asked: set[str] = field(default_factory=set)  # digests of all runs that sweeps have planned


def collect(paths: Sequence[Path], on_progress: Callable[[int, int], None] = lambda done, total: None) -> Collection:
    """All runs in these files and folders, at any depth. Raises ValueError if there is none.

    `on_progress(done, total)` is called after each file.
    """
    found = gather(paths, on_progress)
    if not found.runs and not found.lm_runs:
        raise ValueError(nothing_found(paths, found, "a run on a synthetic task or of a language model"))
    return found


def gather(paths: Sequence[Path], on_progress: Callable[[int, int], None] = lambda done, total: None) -> Collection:
    """As `collect`; there may be no run."""
    files = [file for path in paths for file in record_files(path)]
    files = list(dict.fromkeys(file.resolve() for file in files))
    found, runs = Collection(files=len(files)), dict[str, Run]()
    for n, file in enumerate(files, start=1):
        for run in read_file(file, found):
            known = runs.setdefault(run.digest, run)
            if known is not run:
                found.repeated += 1
                less, runs[run.digest] = sorted((known, run), key=precedence)
                if less.status != "unfinished" and less.lines != runs[run.digest].lines:
                    found.others.append(less)
        on_progress(n, len(files))
    for path in paths:
        for log in sorted(path.rglob(LOG)) if path.is_dir() else ():
            read_sweep(log.parent, found)
    for run in runs.values():
        (found.runs if run.kind.has_epochs else found.lm_runs).append(run)
    return found


def precedence(run: Run) -> tuple[bool, bool, int, int, str, str]:
    """A sort key of the records of one run: the greatest counts, in whichever order the files were given.

    One that has ended comes first, then one that lacks no epoch. Between equally complete ones settings, code and
    machine decide, so that runs of one sweep count together, and then a checksum: never the result. The number of lines
    depends on the result where a run can stop early.
    """
    has_ended = run.status in ENDED
    depends = has_ended and run.kind.has_epochs
    sizes = (0, 0) if depends else (len(run.epochs), len(run.lines))
    first, whole = json.dumps(run.lines[0]), json.dumps(run.lines).encode()
    return has_ended, depends and not run.lacks_epochs, *sizes, first, hashlib.sha256(whole).hexdigest()


def nothing_found(paths: Sequence[Path], found: Collection, wanted: str) -> str:
    """The message for a collection without the wanted kind of run."""
    where = ", ".join(map(str, paths))
    if not found.files:
        return f"there is no {RECORD} and no bundle ({', '.join(BUNDLES)}) in {where} or below; train something first"
    others = found.other + len(found.runs) + len(found.lm_runs)
    seen = [f"{plural(found.nameless, 'record')} without a readable first line"] if found.nameless else []
    seen += [f"{plural(others, 'record')} of another kind"] if others else []
    damage = f"; damaged: {', '.join(found.damaged_files[:MAX_NAMED])}" if found.damaged_files else ""
    return (
        f"there is no record of {wanted} in {where}; {plural(found.files, 'file')} read: "
        f"{', '.join(seen) or 'no record at all'}{damage}"
    )


def record_files(path: Path) -> list[Path]:
    """The records and bundles in a folder, at any depth; for a file, the file itself."""
    if path.is_dir():
        return sorted(file for pattern in (RECORD, *BUNDLES) for file in path.rglob(pattern))
    if not path.exists():
        raise ValueError(f"{path}: there is no such file or folder")
    if path.suffix not in OPENERS:
        raise ValueError(f"{path} is not a record; give folders, {RECORD} files, or bundles ({', '.join(BUNDLES)})")
    return [path]


def read_file(path: Path, found: Collection) -> Iterator[Run]:
    """The runs of one record or bundle. Damage is counted in `found`."""
    damaged = found.damaged_lines + found.nameless
    for name, lines in split_runs(path, found):
        if not lines or lines[0]["type"] != "run" or "digest" not in lines[0]:
            found.nameless += 1
            continue
        try:
            check_run(lines[0])
            if lines[-1].get("status") == CHANGED:
                raise ValueError("its checksum is not that of its lines")
        except ValueError as error:
            found.other += 1
            if len(found.other_names) < MAX_NAMED:
                found.other_names.append(f"{name} ({error})")
            continue
        kept = [line for line in lines if line["type"] != "epoch" or is_whole_epoch(line, lines[0])]
        found.damaged_lines += len(lines) - len(kept)
        yield Run(name, kept, plain(path.name))
    if found.damaged_lines + found.nameless > damaged:
        found.damaged_files.append(plain(f"{path.parent.name}/{path.name}"))


def read_sweep(folder: Path, found: Collection) -> None:
    """Add to `found` which runs a sweep has planned and which of them failed."""
    log = SweepLog(folder)
    found.asked |= log.asked
    found.failures |= {digest: error[:MAX_TEXT] for digest, error in log.failures.items()}
    if log.damaged:
        found.damaged_lines += log.damaged
        found.damaged_files.append(plain(f"{folder.name}/{LOG}"))


def split_runs(path: Path, found: Collection) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """(folder name, intact lines) of each run. A single record has no "folder" line: the file's own folder is used.

    Damaged lines, and those beyond MAX_LINES, are left out and counted.
    """
    name, run, began = plain(path.parent.name), list[dict[str, Any]](), False
    try:
        for _, line in scan(path):
            if line is not None and line["type"] == "folder":
                if began:
                    yield name, run
                name, run, began = str(line.get("folder"))[:MAX_TEXT], [], True
            elif line is None or not is_whole(line) or len(run) == MAX_LINES:
                found.damaged_lines += 1
            else:
                run.append(line)
                began = True
    except TORN:
        found.damaged_lines += 1  # a torn archive does not tell how many more there were
    if began:
        yield name, run


def check_bundle_name(path: Path) -> None:
    """Raise ValueError if the name of a bundle has the wrong suffix."""
    if path.suffixes[-2:] not in ([".jsonl", ".xz"], [".jsonl", ".gz"]):
        raise ValueError(f"{path}: the name of a bundle must end in .jsonl.xz or .jsonl.gz")


def distinct(runs: Iterable[Run]) -> list[Run]:
    """The runs sorted by digest and without copies: the same runs give the same bundle in whichever order they come."""
    found = {(run.digest, json.dumps(run.lines)): run for run in sorted(runs, key=lambda run: run.folder)}
    return [found[key] for key in sorted(found)]


def write_bundle(runs: Sequence[Run], path: Path) -> None:
    """Write the records of all runs into one compressed file, which `collect` can read."""
    check_bundle_name(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (line for run in runs for line in ({"type": "folder", "folder": run.folder}, *run.lines))
    text = "".join(f"{json.dumps(line, separators=(',', ':'))}\n" for line in lines).encode()
    compressed = gzip.compress(text, mtime=0) if path.suffix == ".gz" else lzma.compress(text)
    with replacing(path) as file:
        file.write(compressed)
