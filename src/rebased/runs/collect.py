"""Collect runs from folders of runs and sweeps, from single records and from compressed bundles.

A bundle is a file of many records. Before each record there is a line of type "folder" with the name of the run's
folder. The suffix `.xz` or `.gz` says how the bundle is compressed. Damaged lines are left out and counted.
"""

import gzip
import json
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any, BinaryIO

from rebased.files import replacing
from rebased.runs import sweep_log
from rebased.runs.finished import Run
from rebased.runs.record import RECORD

OPENERS: dict[str, Callable[..., Any]] = {".jsonl": open, ".gz": gzip.open, ".xz": lzma.open}
SEGMENT = ("seq_len", "examples")
MACHINE = ("cpu", "cores", "threads", "gpu", "system", "python", "torch")
BUNDLES = ("*.jsonl.gz", "*.jsonl.xz")
TORN = (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error)


@dataclass
class Collection:
    """The runs of one report, one per digest, and counts of what was left out."""

    runs: list[Run] = field(default_factory=list)  # on synthetic tasks
    lm_runs: list[Run] = field(default_factory=list)  # of language models
    files: int = 0
    damaged_lines: int = 0
    damaged_files: list[str] = field(default_factory=list)  # names of files with damaged lines, or that end too early
    nameless: int = 0  # records whose first line is damaged or missing
    other: int = 0  # records of another kind of run
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
        for log in sorted(path.rglob(sweep_log.LOG)) if path.is_dir() else ():
            read_sweep(log, found)
    for run in runs.values():
        (found.runs if is_synthetic(run.lines[0]) else found.lm_runs).append(run)
    return found


def completeness(run: Run) -> tuple[bool, int, int]:
    """A sort key: of several records of one run, the greatest is kept. Done comes first, then the number of lines."""
    return run.status == "done", len(run.epochs), len(run.lines)


def precedence(run: Run) -> tuple[tuple[bool, int, int], str]:
    """A sort key of the records of one run: the greatest counts, in whichever order the files were given."""
    return completeness(run), json.dumps(run.lines)


def nothing_found(paths: Sequence[Path], found: Collection, wanted: str) -> str:
    """The message for a collection without the wanted kind of run."""
    where = ", ".join(map(str, paths))
    if not found.files:
        return f"there is no {RECORD} and no bundle ({', '.join(BUNDLES)}) in {where} or below; train something first"
    others = found.other + len(found.runs) + len(found.lm_runs)
    return (
        f"none of the {found.files} file(s) in {where} has a record of {wanted}: {found.nameless} record(s) without a "
        f"readable first line, {others} of another kind"
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
    with OPENERS[path.suffix](path, "rb") as file:
        for name, lines in split_runs(whole_lines(file, found), path):
            if not lines or lines[0]["type"] != "run" or "digest" not in lines[0]:
                found.nameless += 1
            elif not is_synthetic(lines[0]) and not is_text(lines[0]):
                found.other += 1
            else:
                kept = [line for line in lines if line["type"] != "epoch" or is_whole_epoch(line)]
                found.damaged_lines += len(lines) - len(kept)
                yield Run(name, kept, path.name)
    if found.damaged_lines + found.nameless > damaged:
        found.damaged_files.append(f"{path.parent.name}/{path.name}")


def read_sweep(path: Path, found: Collection) -> None:
    """Add to `found` which runs a sweep has planned and which of them failed."""
    damaged = found.damaged_lines
    with open(path, "rb") as file:
        for line in whole_lines(file, found):
            if not sweep_log.is_whole(line):
                found.damaged_lines += 1
            elif line["type"] == "sweep":
                found.asked |= set(line["runs"])
            elif line["type"] == "failed":
                found.failures[line["digest"]] = line["error"]
            elif line["type"] == "retry":
                found.failures.pop(line["digest"], None)
    if found.damaged_lines > damaged:
        found.damaged_files.append(f"{path.parent.name}/{path.name}")


def whole_lines(file: BinaryIO, found: Collection) -> Iterator[dict[str, Any]]:
    """The intact lines of a record. Others are counted as damaged, except an unfinished last line: it is being
    written."""
    try:
        for text in file:
            if not text.endswith(b"\n"):
                return
            try:
                line = json.loads(text)
                whole = is_whole(line)
            except (ValueError, TypeError, KeyError):
                whole = False
            if whole:
                yield line
            else:
                found.damaged_lines += 1
    except TORN:
        found.damaged_lines += 1  # a torn archive does not tell how many more there were


def is_whole(line: dict[str, Any]) -> bool:
    """True if the line has the fields of its type. A KeyError or TypeError also means that it has not."""
    if line["type"] in ("run", "resume"):
        code, machine = line["code"], line["machine"]
        return all(key in code for key in ("version", "commit", "dirty")) and all(key in machine for key in MACHINE)
    return isinstance(line["type"], str) and (line["type"] != "end" or isinstance(line["status"], str))


def is_whole_epoch(line: dict[str, Any]) -> bool:
    """True if the line of an epoch has all its numbers and they are finite."""
    try:
        splits = [line[split] for split in ("test", "held_out") if split == "test" or split in line]
        numbers = [line["epoch"], line["seconds"], line["test_seconds"], *(split["accuracy"] for split in splits)]
        slices = [part for split in splits for part in (split["by_length"], *optional_parts(split))]
        return all(isfinite(number) for number in (*numbers, *(value for part in slices for value in part.values())))
    except (KeyError, TypeError, AttributeError):
        return False


def optional_parts(split: dict[str, Any]) -> list[dict[str, float]]:
    """Accuracies by number of pairs and by slice, for tasks that have them."""
    return [split[kind] for kind in ("by_pairs", "slices") if kind in split]


def is_synthetic(run: dict[str, Any]) -> bool:
    """True if a record's first line is that of a run on a synthetic task, with all that tables and figures need."""
    try:
        config = run["config"]
        named = all(mixer["name"] for mixer in config["model"]["mixers"]) and config["train"]["protocol"]
        numbers = (config["model"]["d_model"], config["train"]["lr"], config["train"]["seed"], run["parameters"])
        sizes = [part[key] for split in ("train", "test") for part in config["task"][split] for key in SEGMENT]
        return bool(named and sizes) and all(isfinite(number) for number in (*numbers, *sizes))
    except (KeyError, TypeError):
        return False


def is_text(run: dict[str, Any]) -> bool:
    """True if a record's first line is that of a language model's run, with all that tables and figures need."""
    try:
        config = run["config"]
        known = all(mixer["name"] for mixer in config["model"]["mixers"]) and run["corpus"]["sha256"]
        return bool(known) and all(isfinite(n) for n in (config["data"]["seq_len"], config["train"]["seed"]))
    except (KeyError, TypeError):
        return False


def split_runs(lines: Iterable[dict[str, Any]], path: Path) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """(folder name, lines) of each run. A single record has no "folder" line: the file's own folder is used."""
    name, run = path.parent.name, list[dict[str, Any]]()
    began = False
    for line in lines:
        if line["type"] == "folder":
            if began:
                yield name, run
            name, run, began = str(line.get("folder")), [], True
        else:
            run.append(line)
            began = True
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
