"""Recipes: mixtures of public texts, each file pinned by its checksum, that anybody can rebuild. One is mini-pile."""

import fnmatch
import hashlib
import io
import tarfile
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from pydantic import Field

from rebased.config import Config, did_you_mean, load_config
from rebased.data.encode_chunks import CHUNK_BYTES
from rebased.data.manifest import FoundFile
from rebased.data.sources import Document, Source, compile_start, open_text, text_documents
from rebased.files import replacing, sha256_file

RECIPES = Path(__file__).with_name("recipes")
ENDING = ".recipe.yaml"  # of a recipe that does not come with the package
TIMEOUT = 60  # seconds without an answer of a server


class PinnedFile(Config):
    """A file of a recipe."""

    url: str
    sha256: str | None = Field(None, pattern=r"^[0-9a-f]{64}$")  # of an archive, or of an unpacked text; None: any file
    member: str = ""  # the file that is the text, in a .zip with several

    @property
    def name(self) -> str:
        """The last part of the address."""
        return self.url.rpartition("/")[2]


class RecipeSource(Config):
    """One kind of text in a recipe."""

    licence: str
    files: tuple[PinnedFile, ...] = Field(min_length=1)
    members: tuple[str, ...] = ()  # patterns: such files of an archive are read; without, the file is one text
    document_start: str | None = None  # regular expression: a line with a match begins a document
    max_bytes: int = Field(10**6, gt=0)  # larger files of an archive are left out: they are tables, most often


class Recipe(Config):
    """What a mixture consists of, by the names of its sources."""

    sources: dict[str, RecipeSource] = Field(min_length=1)


def find_recipe(names: Sequence[str]) -> Path | None:
    """The recipe that these SOURCES of a command name, if they name one: its path."""
    known = {path.stem: path for path in RECIPES.glob("*.yaml")}
    chosen = [name for name in names if name.endswith(ENDING) or (name in known and not Path(name).exists())]
    if chosen and len(names) > 1:
        other = next(name for name in names if name != chosen[0])
        hint = f"; --from takes one NAME=PATH, repeat it: --from {other}" if "=" in other else ""
        raise ValueError(f"{chosen[0]} is a recipe; it cannot be mixed with other sources{hint}")
    return known.get(chosen[0], Path(chosen[0])) if chosen else None


def read_recipe(path: Path) -> Recipe:
    """The recipe in a file. Raises ValueError if it is not one."""
    return load_config(Recipe, path)


class Fetched(NamedTuple):
    """A recipe with all its files on this disk, whose checksums have been compared."""

    recipe: Recipe
    sources: dict[str, Source]  # by name
    found: tuple[FoundFile, ...]


def parse_given(words: Sequence[str], recipe: Recipe) -> dict[str, Path]:
    """What the values of --from mean, NAME=PATH each: where the files of a source are."""
    given = {}
    for word in words:
        name, equals, path = word.partition("=")
        if not equals or not path:
            raise ValueError(f"--from {word!r} is not NAME=PATH")
        if name not in recipe.sources:
            raise ValueError(
                f"--from {word!r}: there is no source {name!r}; {did_you_mean(name, list(recipe.sources))}"
            )
        given[name] = Path(path)
    return given


def fetch(
    recipe: Recipe,
    downloads: Path,
    given: Mapping[str, Path],
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Fetched:
    """Find or download all files of a recipe, and compare their checksums.

    A file is looked for in `given` (a file, or a folder with files of their own names, by source), then in `downloads`,
    to which it is downloaded if it is nowhere. `on_progress(done, total)` counts files.
    """
    total = sum(len(source.files) for source in recipe.sources.values())
    sources: dict[str, Source] = {}
    found: list[FoundFile] = []
    for name, source in recipe.sources.items():
        paths, sums = [], []
        for file in source.files:
            on_progress(len(found), total)
            path = _locate(name, source, file, given.get(name), downloads)
            sha256 = _checksum(path, file, archive=bool(source.members))
            if file.sha256 not in (None, sha256):
                raise ValueError(
                    f"{name}: {path} has sha256 {sha256[:12]}..., the recipe says {str(file.sha256)[:12]}...; "
                    f"remove it and fetch {file.url}"
                )
            paths.append(path)
            sums.append(sha256)
            found.append(FoundFile(source=name, url=file.url, sha256=sha256))
        sources[name] = PinnedSource(name, source, paths, sums)
    on_progress(total, total)
    return Fetched(recipe, sources, tuple(found))


def _locate(name: str, source: RecipeSource, file: PinnedFile, given: Path | None, downloads: Path) -> Path:
    if given is not None:
        path = given / file.name if given.is_dir() else given
        if not path.is_file() or (len(source.files) > 1 and not given.is_dir()):
            wanted = f"the folder with {file.name} and the others" if len(source.files) > 1 else f"{file.name}"
            raise ValueError(f"--from {name}={given}: there is no file {path}; name {wanted}")
        return path
    path = downloads / file.name
    if not path.is_file():
        downloads.mkdir(parents=True, exist_ok=True)
        try:
            with urllib.request.urlopen(file.url, timeout=TIMEOUT) as answer, replacing(path) as target:
                while chunk := answer.read(CHUNK_BYTES):
                    target.write(chunk)
        except (urllib.error.URLError, OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise ValueError(
                f"{name}: {file.url} could not be fetched ({reason}); fetch it elsewhere and add --from {name}=PATH"
            ) from error
    return path


def _checksum(path: Path, file: PinnedFile, *, archive: bool) -> str:
    if archive:
        return sha256_file(path)
    with _open_any(path, file.member) as (stream, _):
        return hashlib.file_digest(stream, "sha256").hexdigest()  # type: ignore[arg-type]


@contextmanager
def _open_any(path: Path, member: str) -> Iterator[tuple[BinaryIO, Callable[[], int]]]:
    """`open_text`, also of a text in a .zip."""
    if path.suffix != ".zip":
        with open_text(path) as opened:
            yield opened
        return
    with (
        open(path, "rb") as raw,
        _unpacking(path),
        zipfile.ZipFile(raw) as archive,
        archive.open(member or archive.namelist()[0]) as stream,
    ):
        yield stream, raw.tell  # type: ignore[misc]


@contextmanager
def _unpacking(path: Path) -> Iterator[None]:
    """Inside, a damaged archive raises ValueError."""
    try:
        yield
    except (zipfile.BadZipFile, tarfile.TarError, zlib.error, EOFError, KeyError, IndexError) as error:
        raise ValueError(f"{path} cannot be unpacked: {error}; fetch it again") from error


class PinnedSource(Source):
    """A source of a recipe. Its documents have a fixed order, and each is held in memory."""

    def __init__(self, name: str, spec: RecipeSource, paths: list[Path], sums: list[str]) -> None:
        self.name, self.done, self.skipped, self.files = name, 0, [], []
        self._spec, self._paths, self._sums = spec, paths, sums
        self._start = compile_start(spec.document_start)
        self.size = sum(path.stat().st_size for path in paths)

    def fingerprint(self) -> list[Any]:
        """The checksums: where the files are, and when they were written, does not matter."""
        return [self.name, self._sums]

    def documents(self) -> Iterator[Document]:
        """The documents in order. Each must be read before the next is taken."""
        self.done, self.skipped = 0, []
        for path, file in zip(self._paths, self._spec.files, strict=True):
            before = self.done
            for where, stream, position in self._texts(path, file):
                for document in text_documents(stream, where, self._start):
                    self.done = before + position()
                    yield document
            self.done = before + path.stat().st_size

    def _texts(self, path: Path, file: PinnedFile) -> Iterator[tuple[str, BinaryIO, Callable[[], int]]]:
        """(name, stream, bytes on disk read so far) of the file, or of each chosen file of an archive."""
        if not self._spec.members:
            with _open_any(path, file.member) as (stream, position):
                yield path.name, stream, position
            return
        with open(path, "rb") as raw, _unpacking(path):
            for name, content in _read_members(raw, path, self._chosen):
                if not content or b"\0" in content:
                    self.skipped.append(f"{path}/{name}")
                else:
                    yield f"{path.name}/{name}", io.BytesIO(content), raw.tell

    def _chosen(self, name: str, size: int) -> bool:
        return size <= self._spec.max_bytes and any(fnmatch.fnmatchcase(name, each) for each in self._spec.members)


def _read_members(raw: BinaryIO, path: Path, chosen: Callable[[str, int], bool]) -> Iterator[tuple[str, bytes]]:
    """(name, content) of the chosen files of an archive, in its own order. Nothing is written to disk."""
    if path.suffix in (".zip", ".whl"):
        with zipfile.ZipFile(raw) as archive:
            for entry in archive.infolist():
                if not entry.is_dir() and chosen(entry.filename, entry.file_size):
                    yield entry.filename, archive.read(entry)
        return
    with tarfile.open(fileobj=raw, mode="r|*") as tar:
        for member in tar:
            if member.isfile() and chosen(member.name, member.size):
                content = tar.extractfile(member)
                assert content is not None  # it is a file
                yield member.name, content.read()
