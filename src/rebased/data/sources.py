"""Sources of text: files of several kinds, folders, Hugging Face datasets, and Python's standard library."""

import gzip
import io
import json
import lzma
import re
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, TypeVar

from rebased.data.encode_chunks import CHUNK_BYTES, read_chunks
from rebased.data.pile import TokenisedFile
from rebased.data.zstd import ZstandardReader

Kind = Literal["text", "jsonl", "tokens"]
Item = TypeVar("Item")
COMPRESSED = (".xz", ".gz", ".zst")
JSON_LINES = (".jsonl", ".ndjson")
LIBRARY = "the standard library"
HUB = "hf:"
SNIFF = 2**13  # bytes that decide whether a file is text


@dataclass(frozen=True)
class Document:
    """A document that can be read once, in chunks. Its size is a function: it may have to read the whole file."""

    kind: Kind
    source: str  # where it is from, for messages
    chunks: Iterable[bytes]
    size: Callable[[], int]  # in bytes
    dtype: str = ""  # of tokens; "" for text
    divisible: bool = True  # whether it may be cut between splits


class SourceFile(NamedTuple):
    """A file of a source."""

    path: Path
    kind: Kind
    size: int  # bytes on disk
    changed: int  # time of the last change, ns


class Source:
    """One SOURCE of the command line: a file, a folder, hf:NAME, or `LIBRARY`. Its documents have a fixed order.

    `field` is the key of the text in JSON lines and datasets. `document_start` is a regular expression: in text files a
    line with a match begins a document. Raises ValueError if there is no such source or a named file is not text.

    Attributes: `files`, `size` (their bytes on disk), `done` (bytes on disk read so far) and `skipped` (names of empty
    or binary files in folders).
    """

    def __init__(self, name: str, *, field: str, document_start: str | None) -> None:
        self.name, self.field = name, field
        self.done = 0
        self.skipped: list[str] = []
        self._start = compile_start(document_start)
        self.files = [] if name.startswith(HUB) else list(_find(name))
        self.size = sum(file.size for file in self.files)

    def fingerprint(self) -> list[Any]:
        """JSON data that changes whenever a file of the source does."""
        return [self.name, [[str(file.path), file.size, file.changed] for file in self.files]]

    def documents(self) -> Iterator[Document]:
        """The documents in order. Each must be read before the next is taken."""
        self.done, self.skipped = 0, []
        if self.name.startswith(HUB):
            yield from dataset_documents(open_dataset(self.name), self.name, self.field)
        for file in self.files:
            before = self.done
            yield from self._documents_of(file)
            self.done = before + file.size

    def _documents_of(self, file: SourceFile) -> Iterator[Document]:
        if file.kind == "tokens":
            yield from _tokenised(file.path)
            return
        if sniff(file.path):
            self.skipped.append(str(file.path))
            return
        before = self.done
        with open_text(file.path) as (stream, position):

            def counted(items: Iterable[Item]) -> Iterator[Item]:
                for item in items:
                    self.done = before + position()
                    yield item

            if file.kind == "jsonl":
                yield from counted(_json_lines(stream, file.path))
            elif self._start is not None:
                yield from counted(text_documents(stream, str(file.path), self._start))
            else:
                yield Document("text", str(file.path), counted(read_chunks(stream)), lambda: text_size(file.path))


def _find(name: str) -> Iterator[SourceFile]:
    if name == LIBRARY:
        root = Path(sysconfig.get_path("stdlib"))
        left_out = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
        paths = [path for path in root.rglob("*.py") if not left_out & set(path.relative_to(root).parts)]
        if not paths:
            raise ValueError(f"there is no *.py file in {root}; name a SOURCE")
        yield from (_file(path, "text") for path in sorted(paths))
        return
    path = Path(name)
    if path.is_dir():
        found = [below for below in sorted(path.rglob("*")) if below.is_file()]
        found = [below for below in found if not any(part.startswith(".") for part in below.relative_to(path).parts)]
        if not found:
            raise ValueError(f"{path} has no files in it; name a folder with text")
        for below in found:
            if below.suffix == ".bin" and below.with_suffix(".idx").is_file():
                continue  # the index stands for the pair
            yield _file(below, kind_of(below))
    elif path.suffix in (".bin", ".idx") or path.with_name(path.name + ".idx").is_file():
        pair = path if path.suffix in (".bin", ".idx") else path.with_name(path.name + ".idx")
        yield _file(Path(TokenisedFile(pair).index_path), "tokens")
    elif path.is_file():
        if problem := sniff(path):  # what was named must be text; what is found in folders is skipped
            raise ValueError(f"{path} {problem}; name text files")
        yield _file(path, kind_of(path))
    else:
        raise ValueError(f"there is no file or folder {path}; a dataset of the Hugging Face Hub is {HUB}NAME[:CONFIG]")


def _file(path: Path, kind: Kind) -> SourceFile:
    state = path.stat()
    size = path.with_suffix(".bin").stat().st_size if kind == "tokens" else state.st_size
    return SourceFile(path, kind, size, state.st_mtime_ns)


def kind_of(path: Path) -> Kind:
    """What a file holds, judged by its name: tokens, JSON lines or text."""
    bare = path.with_suffix("") if path.suffix in COMPRESSED else path
    if path.suffix == ".idx":
        return "tokens"
    return "jsonl" if bare.suffix in JSON_LINES else "text"


def sniff(path: Path) -> str | None:
    """Why a file is not text: it is empty, or has a zero byte near its beginning. None if it is text."""
    with open_text(path) as (stream, _):
        begin = stream.read(SNIFF)
    if not begin:
        return "is empty"
    if b"\0" in begin:
        return f"is not text: byte {begin.index(0)} is zero"
    return None


def text_size(path: Path) -> int:
    """The size of a file in bytes after decompression; a compressed file is read for that."""
    if path.suffix not in COMPRESSED:
        return path.stat().st_size
    with open_text(path) as (stream, _):
        return sum(map(len, iter(lambda: stream.read(CHUNK_BYTES), b"")))


@contextmanager
def open_text(path: Path) -> Iterator[tuple[BinaryIO, Callable[[], int]]]:
    """(a stream of a file's decompressed bytes, a function that returns how many bytes on disk have been read).

    A damaged .xz, .gz or .zst file raises ValueError in the block.
    """
    with open(path, "rb") as raw:
        try:
            if path.suffix == ".xz":
                with lzma.LZMAFile(raw) as unpacked:
                    yield io.BufferedReader(unpacked, CHUNK_BYTES), raw.tell
            elif path.suffix == ".gz":
                with gzip.GzipFile(fileobj=raw) as unzipped:
                    yield io.BufferedReader(unzipped, CHUNK_BYTES), raw.tell
            elif path.suffix == ".zst":
                yield io.BufferedReader(ZstandardReader(raw, path), CHUNK_BYTES), raw.tell
            else:
                yield raw, raw.tell
        except (lzma.LZMAError, gzip.BadGzipFile, zlib.error, EOFError) as error:
            raise ValueError(f"{path} cannot be unpacked near byte {raw.tell():,}: {error}") from error


def _json_lines(stream: BinaryIO, path: Path) -> Iterator[Document]:
    """One document per line. It stays JSON, because the processes that encode parse it too."""
    for number, line in enumerate(stream, 1):
        if line.strip():
            yield Document("jsonl", f"{path}, line {number}", [line], line.__len__, divisible=False)


def text_documents(stream: BinaryIO, where: str, start: re.Pattern[bytes] | None) -> Iterator[Document]:
    """Documents that each begin with a line in which `start` matches; one document if it is None."""
    if start is None:
        yield in_memory(stream.read(), where)
        return
    held, searched = bytearray(), 0
    for chunk in read_chunks(stream):
        held += chunk
        begins = [match.start() for match in start.finditer(held, searched) if match.start()]
        for first, last in pairwise([0, *begins]):
            yield in_memory(bytes(held[first:last]), where)
        del held[: begins[-1] if begins else 0]
        searched = held.rfind(b"\n") + 1  # the last line may be incomplete, so it is searched again
    if held:
        yield in_memory(bytes(held), where)


def in_memory(text: bytes, where: str) -> Document:
    """A text as one document, which can be read more than once."""
    return Document("text", where, list(read_chunks(io.BytesIO(text))), lambda: len(text))


def compile_start(document_start: str | None) -> re.Pattern[bytes] | None:
    """The compiled regular expression: it matches from the start of a line that begins a document."""
    if document_start is None:
        return None
    try:
        return re.compile(rb"^[^\n]*?(?:" + document_start.encode() + rb")", re.MULTILINE)
    except re.error as error:
        raise ValueError(f"--document-start {document_start!r} is not a regular expression: {error}") from error


def _tokenised(path: Path) -> Iterator[Document]:
    file = TokenisedFile(path)
    step = CHUNK_BYTES - CHUNK_BYTES % file.dtype.itemsize
    for index in range(len(file)):
        content = file.document(index)
        chunks = [content[at : at + step].tobytes() for at in range(0, len(content), step)]
        yield Document("tokens", f"{path}, document {index}", chunks, content.__len__, file.dtype.str)


def open_dataset(name: str) -> Iterable[dict[str, Any]]:
    """The rows of a dataset on the Hugging Face Hub, streamed. `name` is hf:NAME[:CONFIG][@SPLIT]."""
    spec, _, split = name.removeprefix(HUB).partition("@")
    dataset, _, config = spec.partition(":")
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ImportError(f"{name} needs the datasets library: pip install 'rebased[data]'") from error
    try:
        return load_dataset(dataset, config or None, split=split or "train", streaming=True)
    except Exception as error:  # of many kinds: no network, no such dataset, no such config
        raise ValueError(f"{name} could not be opened: {str(error)[:300]}") from error


def dataset_documents(rows: Iterable[dict[str, Any]], name: str, field: str) -> Iterator[Document]:
    """One document per row of a dataset: the text under the key `field`."""
    for number, row in enumerate(rows):
        line = json.dumps({field: text_of(row, field, f"{name}, row {number}")}).encode()
        yield Document("jsonl", f"{name}, row {number}", [line], line.__len__, divisible=False)


def text_of(row: Any, field: str, where: str) -> str:
    """The text under the key `field` of a JSON object. If there is none, raises ValueError that names `where`."""
    if not isinstance(row, dict) or field not in row:
        is_object = isinstance(row, dict)
        has = f"has the fields {', '.join(map(repr, row))}" if is_object else f"is not an object: {str(row)[:30]!r}"
        raise ValueError(f"{where} {has}; it needs a field {field!r} (--field names another)")
    if not isinstance(row[field], str):
        raise ValueError(
            f"{where}: {field!r} is {type(row[field]).__name__} and should be text (--field names another)"
        )
    return row[field]
