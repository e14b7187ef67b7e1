"""rebased data: prepare text as tokens on disk, and verify a prepared folder."""

import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from rebased import cli
from rebased.cli import INTERRUPTED
from rebased.cli.output import OUT_OPTION, TO_TERMINAL, Output, progress_bars, say
from rebased.cli.rich_table import TerminalTable
from rebased.config import plural
from rebased.data import PrepareConfig, Progress
from rebased.data import prepare as run_prepare
from rebased.data.manifest import MANIFEST, Manifest, files_of, read_manifest, verify_file
from rebased.data.overlap import RUN
from rebased.data.recipe import Fetched, fetch, find_recipe, parse_given, read_recipe
from rebased.data.splits import DEFAULT_SPLIT, parse_size
from rebased.report.tables import Table
from rebased.train.executors.local import usable_cores

DOWNLOADS = Path("data/downloads")
COUNTED = ("documents", "text_bytes", "tokens")  # of a split
REPORTED = ("invalid_utf8", "skipped_files", "divided", "duplicates", "shared_runs")  # of the whole


def prepare(
    *sources: str,
    out: Annotated[Path, OUT_OPTION],
    tokenizer: str = "bytes",
    end_of_text: str | None = None,
    split: Annotated[tuple[str, ...], Parameter(negative="", show_default=False)] = (DEFAULT_SPLIT,),
    field: str = "text",
    document_start: str | None = None,
    invalid_utf8: Literal["replace", "stop"] = "replace",
    workers: int | None = None,
    shard_size: str = "256MB",
    resume: Annotated[bool, Parameter(negative="")] = False,
    given: Annotated[tuple[str, ...], Parameter(name="--from", negative="", show_default=False)] = (),
    downloads: Path = DOWNLOADS,
    to: Output = TO_TERMINAL,
) -> int:
    """Encode text as memory-mapped tokens, with document boundaries, checksums and the tokenizer.

    Parameters
    ----------
    sources
        Text files, folders, JSON lines (.jsonl), each also .gz, .xz or .zst; NAME.idx of a tokenised pair NAME.bin and
        NAME.idx; hf:NAME[:CONFIG][@SPLIT] for a dataset on the Hugging Face Hub. Default: Python's standard library. Or
        a recipe: mini-pile, or a file NAME.recipe.yaml.
    out
        Folder to write.
    tokenizer
        bytes (one token per byte, and 256 after each document), a tokenizer.json (also .gz, .xz or .zst), or a name on
        the Hugging Face Hub.
    end_of_text
        The token after each document, if it is not the tokenizer's usual one; '' for none.
    split
        Shares: train=0.9,valid=0.1; or bytes, in order: train=90MB,valid=5MB,test=5MB; or one source per split:
        train=a.txt,valid=b.txt. Default: train=0.9,valid=0.05,test=0.05.
    field
        The key of the text in JSON lines and in rows of a dataset.
    document_start
        Regular expression: in text files a line with a match begins a document. Default: each file is one document.
    invalid_utf8
        replace: bytes that are not UTF-8 become U+FFFD and are counted. stop: they are an error.
    workers
        Threads that encode. Default: one per core. The result does not depend on it.
    shard_size
        Bytes of the sources per shard. After a crash at most one shard is encoded again.
    resume
        Continue a preparation that the same command began.
    given
        For a recipe: NAME=PATH says where the file of a source is, or the folder with its files.
    downloads
        For a recipe: the folder of the files that --from does not name. What is not there is downloaded.
    """
    to.check()
    config = PrepareConfig(
        sources=sources,
        tokenizer=tokenizer,
        end_of_text=end_of_text,
        split=split,
        field=field,
        document_start=document_start,
        invalid_utf8=invalid_utf8,
        shard_bytes=parse_size(shard_size),
    )
    console = to.console()
    begin, was_done = time.perf_counter(), (out / MANIFEST).exists()
    try:
        fetched = fetch_recipe(sources, given, downloads, console)
        threads = usable_cores() if workers is None else workers
        with progress_bar(console) as on_progress:
            manifest = run_prepare(
                config, out, fetched=fetched, workers=threads, resume=resume, on_progress=on_progress
            )
    except KeyboardInterrupt:
        words = shlex.join(["rebased", *cli.typed, *([] if resume else ["--resume"])])
        say(console, f"interrupted; finished shards are kept; continue with: {words}")
        return INTERRUPTED
    show(manifest, out, to)
    say(console, f"{out} was done already" if was_done else f"wrote {out} in {time.perf_counter() - begin:.1f} s")
    to.emit(contents(manifest, out))
    return 0


def fetch_recipe(sources: tuple[str, ...], given: tuple[str, ...], downloads: Path, console: Console) -> Fetched | None:
    """The recipe that the sources name, with its files; None if they name none."""
    path = find_recipe(sources)
    if path is None:
        if given:
            raise ValueError("--from belongs to a recipe, such as mini-pile; name files as SOURCES")
        return None
    recipe = read_recipe(path)
    with progress_bars(console) as begin_bar:
        return fetch(recipe, downloads, parse_given(given, recipe), begin_bar("files of the recipe"))


def show(manifest: Manifest, folder: Path, to: Output) -> None:
    """Print what a prepared folder holds: a table of the splits, one of the sources of a recipe, and remarks."""
    results, tokenizer = to.result_console(), manifest.tokenizer
    say(results, f"{folder}: {tokenizer.name}, {tokenizer.vocab_size:,} tokens, {manifest.dtype}")
    results.print(TerminalTable(describe(manifest)))
    if manifest.recipe:
        say(
            results,
            f"of a split: the share of its runs of {RUN} tokens that occur in {next(iter(manifest.splits))} too",
        )
        results.print(TerminalTable(describe_sources(manifest)))
    for remark in remarks(manifest):
        say(to.console(), remark)


def verify(folder: Path, /, *, to: Output = TO_TERMINAL) -> int:
    """Compare the checksums of all files of a prepared folder, and print what it holds.

    Every damaged file is named.

    Parameters
    ----------
    folder
        A folder that rebased data prepare wrote.
    """
    to.check()
    console = to.console()
    manifest = read_manifest(folder)
    sizes = {file: (folder / file.file).stat().st_size for file in files_of(manifest, manifest.splits)}
    damaged = []
    with progress_bars(console) as begin_bar:
        compared = begin_bar("comparing files")
        for done, file in enumerate(sizes):
            compared(done, len(sizes))
            try:
                verify_file(folder, file)
            except ValueError as error:
                damaged.append(str(error))
    show(manifest, folder, to)
    counts = {"files": len(sizes), "bytes": sum(sizes.values())}
    to.emit({**contents(manifest, folder), **counts, "damaged": damaged})
    if damaged:
        several = f"{len(damaged)} of {len(sizes)} files are damaged: " if len(damaged) > 1 else ""
        raise ValueError(several + "\n".join(damaged))
    say(console, "every checksum is right")
    return 0


def contents(manifest: Manifest, folder: Path) -> dict[str, Any]:
    """What a prepared folder holds, as JSON data."""
    return {
        "folder": str(folder),
        "tokenizer": manifest.tokenizer.name,
        "vocab_size": manifest.tokenizer.vocab_size,
        "dtype": manifest.dtype,
        "splits": {
            name: {part: getattr(split, part) for part in COUNTED} | {"shards": len(split.shards)}
            for name, split in manifest.splits.items()
        },
        "sources": by_source(manifest),
        **{part: getattr(manifest, part) for part in REPORTED},
    }


def by_source(manifest: Manifest) -> dict[str, dict[str, int]]:
    """Documents and tokens of each source of a recipe."""
    counts = {file.source: {"documents": 0, "tokens": 0} for file in manifest.recipe}
    for shard in (shard for split in manifest.splits.values() for shard in split.shards if counts):
        counts[shard.source]["documents"] += shard.documents
        counts[shard.source]["tokens"] += shard.tokens
    return counts


def describe_sources(manifest: Manifest) -> Table:
    """A table of the sources of a recipe: documents, tokens, and how much of the other splits occurs in the first."""
    _, *others = manifest.splits
    everything = sum(split.tokens for split in manifest.splits.values())
    rows = []
    for name, count in by_source(manifest).items():
        shared = [manifest.shared_runs.get(split, {}).get(name) for split in others]
        parts = ("-" if share is None else f"{share:.1%}" for share in shared)
        tokens = count["tokens"]
        rows.append((name, f"{count['documents']:,}", f"{tokens:,}", f"{tokens / everything:.1%}", *parts))
    return Table(("source", "documents", "tokens", "share", *(f"of {split}" for split in others)), rows)


def describe(manifest: Manifest) -> Table:
    """A table of the splits: documents, bytes of text, tokens and shards."""
    rows = []
    for name, split in manifest.splits.items():
        size = split.text_bytes
        known = ("?", "?") if size is None else (f"{size:,}", f"{size / split.tokens:.3f}")
        rows.append((name, f"{split.documents:,}", known[0], f"{split.tokens:,}", known[1], f"{len(split.shards)}"))
    return Table(("split", "documents", "text bytes", "tokens", "bytes per token", "shards"), rows)


def remarks(manifest: Manifest) -> list[str]:
    """What a user should know about the text besides the table."""
    found = []
    if manifest.invalid_utf8:
        found.append(f"not UTF-8 and replaced by U+FFFD: {manifest.invalid_utf8:,} (--invalid-utf8 stop shows where)")
    if manifest.skipped_files:
        found.append(f"left out, empty or binary: {plural(manifest.skipped_files, 'file')}")
    if manifest.divided:
        found.append(
            f"divided between the splits: {plural(manifest.divided, 'document')} larger than the smallest split; the "
            "table counts the parts"
        )
    if manifest.duplicates:
        found.append(f"left out, equal to another: {plural(manifest.duplicates, 'document')}")
    if manifest.tokenizer.end_of_text is None:
        found.append("this tokenizer has no token that ends a document; --end-of-text names one")
    return found


@contextmanager
def progress_bar(console: Console) -> Iterator[Callable[[Progress], None]]:
    """The `on_progress` of a preparation: a bar in a terminal, one line per shard in a log."""
    bar = RichProgress(
        TextColumn("shard {task.fields[shard]}", markup=False),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TextColumn("{task.fields[text]}", markup=False),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )
    task = bar.add_task("prepare", total=None, shard=1, text="reading")
    begin, kept, written = 0.0, 0, 0

    def show(now: Progress) -> None:
        nonlocal begin, kept, written
        if not begin:  # the speed leaves out what an earlier command has encoded
            begin, kept = time.perf_counter(), now.source_bytes
        speed = (now.source_bytes - kept) / max(1e-9, time.perf_counter() - begin)
        text = f"{now.source_bytes / 1e6:,.1f} MB  {speed / 1e6:,.1f} MB/s  {now.tokens:,} tokens"
        bar.update(task, completed=now.done, total=now.total or None, shard=now.shards + 1, text=text)
        if not console.is_terminal and now.shards > written:
            say(console, f"shard {now.shards} is written: {text}")
        written = now.shards

    with bar:
        yield show
