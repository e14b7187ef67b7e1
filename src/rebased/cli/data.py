"""rebased data: text to tokens on disk, and a look at what is there."""

import shlex
import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Annotated, Literal

from cyclopts import Parameter
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.table import Table

from rebased.cli import INTERRUPTED
from rebased.data import Corpus, PrepareConfig, Progress
from rebased.data import prepare as run_prepare
from rebased.data.manifest import Manifest
from rebased.data.splits import DEFAULT_SPLIT, parse_size
from rebased.train.executors.local import usable_cores


def prepare(
    *sources: str,
    out: Annotated[Path, Parameter(name=["--out", "-o"])],
    tokenizer: str = "bytes",
    end_of_text: str | None = None,
    split: Annotated[tuple[str, ...], Parameter(negative="", show_default=False)] = (DEFAULT_SPLIT,),
    field: str = "text",
    document_start: str | None = None,
    invalid_utf8: Literal["replace", "stop"] = "replace",
    workers: int | None = None,
    shard_size: str = "256MB",
    resume: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Turn text into memory-mapped tokens with document boundaries, checksums and the tokenizer beside them.

    Parameters
    ----------
    sources
        Text files, folders, JSON lines (.jsonl), each also .gz, .xz or .zst; NAME.idx of a tokenised pair NAME.bin and
        NAME.idx; hf:NAME[:CONFIG][@SPLIT] for a dataset of the Hugging Face Hub. None: Python's own standard library.
    out
        Folder to make.
    tokenizer
        bytes (a token a byte, 256 ends a document), a tokenizer.json (also packed), or a name on the Hub.
    end_of_text
        The token that ends a document, if it is not the usual one of this tokenizer; '' for none.
    split
        Shares, train=0.9,valid=0.1; bytes in order, train=90MB,valid=5MB,test=5MB; or a source each,
        train=a.txt,valid=b.txt. Default: train=0.9,valid=0.05,test=0.05.
    field
        Where a line of JSON or a row of a dataset has its text.
    document_start
        Regular expression; in text files a line in which it is found begins a document. Default: a file is a document.
    invalid_utf8
        What is not UTF-8 is replaced by U+FFFD and counted, or stops everything.
    workers
        Processes that encode. Default: one a core. The result does not depend on it.
    shard_size
        How much of the sources makes a shard: what may have to be done again after a crash.
    resume
        Go on where the same command was ended.
    """
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
    console = Console()
    begin = time.perf_counter()
    try:
        with ProgressBar(console) as bar:
            manifest = run_prepare(
                config, out, workers=usable_cores() if workers is None else workers, resume=resume, on_progress=bar.show
            )
    except KeyboardInterrupt:
        words = [word for word in sys.argv[1:] if word != "--resume"]
        say(console, f"interrupted; finished shards are kept; go on with: rebased {shlex.join([*words, '--resume'])}")
        return INTERRUPTED
    console.print(describe(manifest, out))
    for remark in remarks(manifest):
        say(console, remark)
    say(console, f"wrote {out} in {time.perf_counter() - begin:.1f} s" if bar.moved else f"{out} was done already")
    return 0


def check(folder: Path) -> int:
    """Say what a prepared folder holds, after reading every file and comparing its checksum.

    Parameters
    ----------
    folder
        What rebased data prepare made.
    """
    console = Console()
    with console.status("reading"):
        corpus = Corpus(folder, verify=True)
    console.print(describe(corpus.manifest, folder))
    for remark in remarks(corpus.manifest):
        say(console, remark)
    say(console, "every checksum is right")
    return 0


def describe(manifest: Manifest, folder: Path) -> Table:
    name, size = manifest.tokenizer.name, manifest.tokenizer.vocab_size
    table = Table(title=f"{folder}: {name}, {size:,} tokens, {manifest.dtype}", title_justify="left", box=SIMPLE_HEAD)
    table.add_column("split")
    for column in ("documents", "text bytes", "tokens", "bytes a token", "shards"):
        table.add_column(column, justify="right")
    for split, content in manifest.splits.items():
        text_bytes = content.text_bytes
        known = ("?", "?") if text_bytes is None else (f"{text_bytes:,}", f"{text_bytes / content.tokens:.3f}")
        table.add_row(
            split, f"{content.documents:,}", known[0], f"{content.tokens:,}", known[1], f"{len(content.shards)}"
        )
    return table


def remarks(manifest: Manifest) -> list[str]:
    found = []
    if manifest.invalid_utf8:
        found.append(f"not UTF-8 and replaced by U+FFFD: {manifest.invalid_utf8:,} (--invalid-utf8 stop shows where)")
    if manifest.skipped_files:
        found.append(f"left out, empty or binary: {manifest.skipped_files:,} files")
    if manifest.tokenizer.end_of_text is None:
        found.append("this tokenizer has no token that ends a document; --end-of-text names one")
    return found


def say(console: Console, text: str) -> None:
    console.print(text, soft_wrap=True, highlight=False, markup=False)


class ProgressBar(AbstractContextManager["ProgressBar"]):
    """In a terminal a bar, in a log a line a shard."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = RichProgress(
            TextColumn("shard {task.fields[shard]}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TextColumn("{task.fields[text]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task: TaskID | None = None
        self._begin, self._first_bytes, self._last = 0.0, 0, Progress(0, 0, 0, 0, 0)

    def __enter__(self) -> "ProgressBar":
        self._bar.start()
        self._task = self._bar.add_task("prepare", total=None, shard=1, text="reading")
        self._begin = time.perf_counter()
        return self

    @property
    def moved(self) -> bool:
        return self._last.tokens > 0

    def show(self, progress: Progress) -> None:
        if self._last.source_bytes == 0 or progress.source_bytes == self._last.source_bytes:
            self._begin, self._first_bytes = time.perf_counter(), progress.source_bytes  # what was kept is not counted
        speed = (progress.source_bytes - self._first_bytes) / max(1e-9, time.perf_counter() - self._begin)
        text = f"{progress.source_bytes / 1e6:,.1f} MB  {speed / 1e6:,.1f} MB/s  {progress.tokens:,} tokens"
        assert self._task is not None
        self._bar.update(
            self._task, completed=progress.done, total=progress.total or None, shard=progress.shards + 1, text=text
        )
        if not self._console.is_terminal and progress.shards > self._last.shards:
            say(self._console, f"shard {progress.shards} is written: {text}")
        self._last = progress

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
