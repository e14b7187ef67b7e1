"""manifest.json: what a prepared folder holds. It is written last, so a folder that has one is complete."""

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from pydantic import Field, ValidationError

from rebased.config import Config, explain
from rebased.files import read_json, replacing, seal, sha256_file, unseal

MANIFEST = "manifest.json"
FORMAT = "rebased-text-1"
DTYPES: dict[str, np.dtype] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
ENDS_DTYPE = np.dtype("<i8")


class FoundFile(Config):
    """A file of a recipe, with the checksum that it had."""

    source: str
    url: str
    sha256: str  # of an archive, or of an unpacked text


class ShardFile(Config):
    """The name and the checksum of a file in a prepared folder."""

    file: str = Field(pattern=r"^[^/]+$")  # never outside of the folder
    sha256: str


class Shard(Config):
    """Consecutive tokens of a split, and where documents end among them."""

    tokens: int = Field(gt=0)
    documents: int = Field(ge=0)  # how many end in this shard
    text_bytes: int | None  # bytes of UTF-8 that the tokens stand for; None if not known
    token_file: ShardFile
    ends_file: ShardFile  # for each document that ends here: how many tokens of the shard come before its end
    source: str = ""  # the source of a recipe that the shard is from


class Split(Config):
    """A split as its shards, in order."""

    shards: tuple[Shard, ...]

    @property
    def tokens(self) -> int:
        """How many tokens the split has, end-of-text tokens included."""
        return sum(shard.tokens for shard in self.shards)

    @property
    def documents(self) -> int:
        """How many documents end in the split."""
        return sum(shard.documents for shard in self.shards)

    @property
    def text_bytes(self) -> int | None:
        """Bytes of UTF-8 that the tokens stand for; end-of-text tokens count 0. None if that is not known."""
        return sum_known(shard.text_bytes for shard in self.shards)


class TokenizerFile(Config):
    """The tokenizer of a prepared folder."""

    name: str  # as the user gave it: `bytes`, the name of a file, a name on the Hub
    file: ShardFile | None  # tokenizer.json; None for bytes
    vocab_size: int = Field(gt=0)
    end_of_text: int | None  # the token after each document


class Manifest(Config):
    """The content of manifest.json."""

    format: str  # FORMAT
    dtype: str  # of the tokens: a key of DTYPES
    tokenizer: TokenizerFile
    splits: dict[str, Split]
    sources: tuple[str, ...] = ()
    invalid_utf8: int = 0  # byte sequences that were not UTF-8 and were replaced
    skipped_files: int = 0  # empty or binary files found in folders
    divided: int = 0  # documents that were divided between the splits: each has a part of it, which it counts as one
    recipe: tuple[FoundFile, ...] = ()  # the files of a recipe
    duplicates: int = 0  # documents of a recipe that were left out: equal ones had come before
    shared_runs: dict[str, dict[str, float]] = Field(default_factory=dict)
    """Of a recipe, by split and source: the share of runs of tokens that occur in the first split too."""


def sum_known(sizes: Iterable[int | None]) -> int | None:
    """The sum of sizes; None if one of them is not known."""
    total = 0
    for size in sizes:
        if size is None:
            return None
        total += size
    return total


def dtype_for(vocab_size: int) -> str:
    """The smaller of "uint16" and "uint32" that holds all token ids of a vocabulary."""
    if not 0 < vocab_size <= 2**32:
        raise ValueError(f"a vocabulary of {vocab_size} tokens cannot be stored: 1 to {2**32} fit into uint32")
    return "uint16" if vocab_size <= 2**16 else "uint32"


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write manifest.json, with a checksum of itself. It marks the folder as complete."""
    with replacing(folder / MANIFEST) as file:
        file.write(json.dumps(seal(manifest.model_dump(mode="json")), indent=1).encode())


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a prepared folder. ValueError if it is damaged, or a file is missing or of another size."""
    path = folder / MANIFEST
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; make one with: rebased data prepare SOURCE -o {folder}")
    if not path.is_file():
        raise ValueError(
            f"{folder} has no {MANIFEST}: it is not a prepared folder, or its preparation is not done; "
            "rebased data prepare makes one, and with --resume it goes on"
        )
    try:
        content = read_json(path)
    except ValueError as error:
        raise ValueError(f"{error}; prepare the text again") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"{path} is not in the format {FORMAT!r}; prepare the text again")
    try:
        manifest = Manifest.model_validate(unseal(content))
    except ValidationError as error:
        raise ValueError(f"{path}: {explain(error)}") from error
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}; copy it again, or prepare the text again") from error
    if manifest.dtype not in DTYPES:
        raise ValueError(f"{path}: dtype {manifest.dtype!r} is not one of {', '.join(DTYPES)}")
    for shard in (shard for split in manifest.splits.values() for shard in split.shards):
        _check_size(folder / shard.token_file.file, shard.tokens * DTYPES[manifest.dtype].itemsize)
        _check_size(folder / shard.ends_file.file, shard.documents * ENDS_DTYPE.itemsize)
    return manifest


def verify_files(folder: Path, manifest: Manifest, splits: Iterable[str]) -> None:
    """Compare the checksums of the tokenizer and of all files of these splits; ValueError at the first that differs."""
    for file in files_of(manifest, splits):
        verify_file(folder, file)


def files_of(manifest: Manifest, splits: Iterable[str]) -> list[ShardFile]:
    """The files of the tokenizer and of these splits, each with its checksum."""
    files = [manifest.tokenizer.file] if manifest.tokenizer.file else []
    files += [
        file
        for split in splits
        for shard in manifest.splits[split].shards
        for file in (shard.token_file, shard.ends_file)
    ]
    return files


def verify_file(folder: Path, file: ShardFile) -> None:
    """Read a file and raise ValueError if its checksum is not the manifest's."""
    found = sha256_file(folder / file.file)
    if found != file.sha256:
        raise ValueError(
            f"{folder / file.file} is damaged: its sha256 is {found[:12]}..., the manifest says {file.sha256[:12]}...; "
            "copy it again from where it was made, or prepare the text again"
        )


def _check_size(path: Path, size: int) -> None:
    found = f"has {path.stat().st_size:,} bytes" if path.is_file() else "is missing"
    if found != f"has {size:,} bytes":
        raise ValueError(f"{path} {found} and should have {size:,}; copy it again, or prepare the text again")
