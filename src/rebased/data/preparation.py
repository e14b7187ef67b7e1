"""Prepare a folder: read sources, assign documents to splits, encode in several threads, write shards. Resumable."""

import json
import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import Field

from rebased.config import Config
from rebased.data.encode import ChunkBatch, ChunkEncoder
from rebased.data.encode_chunks import CHUNK_BYTES
from rebased.data.folder import State, preparation_folder, write_state
from rebased.data.manifest import DTYPES, FORMAT, Manifest, Split, TokenizerFile, dtype_for, write_manifest
from rebased.data.overlap import shared_runs
from rebased.data.recipe import Fetched, Recipe
from rebased.data.shards import Encoded, store_tokenizer, writing_shards
from rebased.data.sources import HUB, LIBRARY, Source
from rebased.data.splits import (
    DEFAULT_SPLIT,
    ByContent,
    ByShare,
    BySize,
    Chunk,
    Rule,
    SplitNotFilled,
    SplitSpec,
    assign_splits,
    parse_split,
)
from rebased.data.tokenizer import Tokenizer, load_tokenizer
from rebased.data.windows import TokenStream
from rebased.files import sha256_bytes

AHEAD = 3  # batches per worker that are read before the oldest one is written


class PrepareConfig(Config):
    """Everything that decides the content of a prepared folder. The number of workers does not."""

    sources: tuple[str, ...] = ()  # files, folders, hf:NAME; empty: Python's standard library
    tokenizer: str = "bytes"  # "bytes", a tokenizer.json, or a name on the Hugging Face Hub
    end_of_text: str | None = None  # the token after each document; None: the tokenizer's usual one; "": none
    split: tuple[str, ...] = (DEFAULT_SPLIT,)  # see parse_split
    field: str = "text"  # the key of the text in JSON lines and datasets
    document_start: str | None = None  # regular expression: a line with a match begins a document
    invalid_utf8: Literal["replace", "stop"] = "replace"
    shard_bytes: int = Field(default=256 * 10**6, gt=0)  # bytes of the sources per shard
    recipe: Recipe | None = None  # `prepare` sets it if it is given the files of one


class Progress(NamedTuple):
    """How far a preparation has come."""

    done: int  # bytes read from disk
    total: int  # bytes on disk; 0 if not known
    source_bytes: int  # decompressed bytes that are encoded
    tokens: int
    shards: int  # finished


def prepare(
    config: PrepareConfig,
    folder: Path,
    *,
    fetched: Fetched | None = None,
    workers: int = 1,
    resume: bool = False,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> Manifest:
    """Write the prepared folder that `config` describes, and return its manifest.

    The folder must be new or empty, or with `resume` one that the same config began or finished. `fetched` has the
    files of a recipe. `workers` threads encode: the `tokenizers` library does so without Python's lock. The result does
    not depend on their number. `on_progress` is called after each batch of chunks.
    """
    if workers < 1:
        raise ValueError(f"workers must be 1 or more, got {workers}")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # so many threads are enough
    spec = parse_split(config.split)
    if spec.sources and config.sources:
        raise ValueError("--split names the sources; leave out the others, or give shares or bytes")
    if fetched is not None:
        config = config.model_copy(update={"recipe": fetched.recipe})
        if not spec.shares:
            raise ValueError(f"a recipe is split by shares, such as {DEFAULT_SPLIT}; got {','.join(config.split)}")
    tokenizer = load_tokenizer(config.tokenizer, config.end_of_text)
    groups = {name: [source] for name, source in fetched.sources.items()} if fetched else _by_split(config, spec)
    plan = _plan(config, tokenizer, groups)
    with preparation_folder(folder, plan, resume) as (state, finished):
        if finished is not None:
            return finished
        entry = store_tokenizer(folder, tokenizer)
        try:
            state, counts = _encode_all(config, folder, spec, groups, tokenizer, state, workers, on_progress)
            manifest = _manifest(config, spec, entry, state, counts)
            if fetched is not None:
                shared = _shared_runs(folder, manifest)
                manifest = manifest.model_copy(update={"recipe": fetched.found, "shared_runs": shared})
        except SplitNotFilled:
            write_state(folder, State(plan=plan))  # without shards: another plan may then use the folder
            raise
        write_manifest(folder, manifest)
        return manifest


def _encode_all(
    config: PrepareConfig,
    folder: Path,
    spec: SplitSpec,
    groups: dict[str, list[Source]],
    tokenizer: Tokenizer,
    state: State,
    workers: int,
    on_progress: Callable[[Progress], None],
) -> tuple[State, dict[str, int]]:
    """Write all shards that `state` does not have. Returns (the final state, files and documents that are counted)."""
    sources = [source for group in groups.values() for source in group]
    total = 0 if any(source.name.startswith(HUB) for source in sources) else sum(source.size for source in sources)
    rule: Rule | None = None  # the groups are those of the splits
    if config.recipe is not None:
        rule = ByContent(spec.shares)
    elif spec.sizes or spec.shares:
        rule = BySize(spec.sizes) if spec.sizes else ByShare(spec.shares, total)
    tokens = sum(shard.tokens for shards in state.shards for shard in shards.values())
    encode = ChunkEncoder(tokenizer, config.field, stop_at_invalid=config.invalid_utf8 == "stop")
    with ThreadPoolExecutor(workers) as threads:
        batches = _batches(groups, rule, config.shard_bytes, by_group=config.recipe is not None)
        for index, of_shard in groupby(batches, key=lambda batch: batch.shard):
            if index < len(state.shards):
                for batch in of_shard:  # a finished shard is read again, to find where the next one begins
                    on_progress(Progress(batch.done, total, state.source_bytes, tokens, index))
                continue
            invalid, source_bytes, source = state.invalid_utf8, state.source_bytes, ""
            with writing_shards(folder, index, dtype_for(tokenizer.vocab_size)) as group:
                for batch, encoded in _in_order(threads, encode, of_shard, AHEAD * workers):
                    source = batch.source
                    group.append(batch.split, encoded)
                    invalid, source_bytes = invalid + encoded.invalid, source_bytes + encoded.source_bytes
                    tokens += len(encoded.tokens)
                    on_progress(Progress(batch.done, total, source_bytes, tokens, index))
                shards = group.finish(source)
            state = State(
                plan=state.plan, shards=(*state.shards, shards), invalid_utf8=invalid, source_bytes=source_bytes
            )
            write_state(folder, state)
    if isinstance(rule, BySize):
        rule.check_enough()
    counts = {"skipped_files": sum(len(source.skipped) for source in sources)}
    if rule is not None:
        counts |= {"divided": rule.divided, "duplicates": rule.duplicates}
    return state, counts


def _in_order(
    threads: ThreadPoolExecutor, encode: ChunkEncoder, batches: Iterable[ChunkBatch], ahead: int
) -> Iterator[tuple[ChunkBatch, Encoded]]:
    """Each batch with its tokens, in order. At most `ahead` batches are read before the oldest one is taken."""
    waiting: deque[tuple[ChunkBatch, Future[Encoded]]] = deque()
    try:
        for batch in batches:
            waiting.append((batch, threads.submit(encode, batch)))
            if len(waiting) == ahead:
                batch, future = waiting.popleft()
                yield batch, future.result()
        for batch, future in waiting:
            yield batch, future.result()
    finally:
        for _, future in waiting:  # after an error
            future.cancel()


def _batches(
    groups: dict[str, list[Source]], rule: Rule | None, shard_bytes: int, by_group: bool
) -> Iterator[ChunkBatch]:
    """All chunks of the sources in order, in batches.

    After `shard_bytes` bytes of the sources, and with `by_group` after each group, the shards of all splits end
    together, so that a resumed preparation can continue at one place of the sources.
    """
    held: dict[str, list[Chunk]] = {}
    sizes = Counter[str]()
    shard = taken = 0

    def ready(names: list[str], source: str) -> Iterator[ChunkBatch]:
        for name in names:
            del sizes[name]
            yield ChunkBatch(name, held.pop(name), shard, _done(groups), source)

    for key, group in groups.items():
        source = key if by_group else ""
        documents = (document for each in group for document in each.documents())
        for name, chunk in assign_splits(documents, rule or Rule({key: 1.0})):
            held.setdefault(name, []).append(chunk)
            sizes[name] += len(chunk.data)
            taken += len(chunk.data)
            if taken >= shard_bytes:
                yield from ready(list(held), source)
                shard, taken = shard + 1, 0
            elif sizes[name] > CHUNK_BYTES // 2:
                yield from ready([name], source)
        if by_group and taken:
            yield from ready(list(held), source)
            shard, taken = shard + 1, 0
    yield from ready(list(held), "")


def _done(groups: dict[str, list[Source]]) -> int:
    """Bytes read from disk so far."""
    return sum(source.done for group in groups.values() for source in group)


def _by_split(config: PrepareConfig, spec: SplitSpec) -> dict[str, list[Source]]:
    """The sources by split; under "" if a rule assigns their documents to splits."""
    names = spec.sources or {"": list(config.sources) or [LIBRARY]}
    return {
        split: [Source(name, field=config.field, document_start=config.document_start) for name in given]
        for split, given in names.items()
    }


def _plan(config: PrepareConfig, tokenizer: Tokenizer, groups: dict[str, list[Source]]) -> dict[str, Any]:
    """What decides the result: two preparations with the same plan write the same bytes."""
    files = [[split, [source.fingerprint() for source in group]] for split, group in groups.items()]
    content = tokenizer.to_json() or b""
    return {
        **config.model_dump(mode="json"),
        "tokenizer file": sha256_bytes(content),
        "files": sha256_bytes(json.dumps(files).encode()),
    }


def _shared_runs(folder: Path, manifest: Manifest) -> dict[str, dict[str, float]]:
    """How much of each source in the other splits occurs in the first split, which is the training text."""
    dtype = DTYPES[manifest.dtype]
    first, *others = manifest.splits
    streams = {}
    for name in others:
        for source in dict.fromkeys(shard.source for shard in manifest.splits[name].shards):
            chosen = tuple(shard for shard in manifest.splits[name].shards if shard.source == source)
            streams[name, source] = TokenStream(folder, Split(shards=chosen), dtype)
    shares = shared_runs(streams, TokenStream(folder, manifest.splits[first], dtype))
    return {
        name: {source: round(share, 4) for (split, source), share in shares.items() if split == name} for name in others
    }


def _manifest(
    config: PrepareConfig, spec: SplitSpec, entry: TokenizerFile, state: State, counts: dict[str, int]
) -> Manifest:
    splits = {name: Split(shards=tuple(group[name] for group in state.shards if name in group)) for name in spec.names}
    empty = [name for name, split in splits.items() if split.tokens < 2]
    if len(empty) == len(splits):
        raise SplitNotFilled("there is no text in the sources")
    if empty:
        raise SplitNotFilled(
            f"{' and '.join(empty)} got no text: these sources have too few documents for so small a share; make it "
            "larger, or give each split a source of its own, such as --split train=a.txt,valid=b.txt"
        )
    return Manifest(
        format=FORMAT,
        dtype=dtype_for(entry.vocab_size),
        tokenizer=entry,
        splits=splits,
        sources=config.sources or tuple(name for names in spec.sources.values() for name in names) or (LIBRARY,),
        invalid_utf8=state.invalid_utf8,
        **counts,
    )
