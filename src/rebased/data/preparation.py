"""From sources to a prepared folder: read, deal, encode in several processes, write shards; end and resume at will."""

import json
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import Field

from rebased.config import Config
from rebased.data.encode import Piece, PieceEncoder
from rebased.data.encode_chunks import PART
from rebased.data.folder import State, give_up, own_folder, write_state
from rebased.data.manifest import (
    FORMAT,
    Manifest,
    Split,
    TokenizerFile,
    dtype_for,
    write_manifest,
)
from rebased.data.pool import ordered_pool
from rebased.data.shards import store_tokenizer, writing_shards
from rebased.data.sources import HUB, LIBRARY, Source, find_sources
from rebased.data.splits import (
    DEFAULT_SPLIT,
    ByShare,
    BySize,
    BySource,
    NeverWhole,
    Part,
    Rule,
    SplitSpec,
    deal,
    parse_split,
)
from rebased.data.tokenizer import Tokenizer, digest, load_tokenizer, restore_tokenizer

WORTH_A_PROCESS = 4 * 10**6  # bytes; with less to do, a process takes longer to start than it saves


class PrepareConfig(Config):
    """What decides the result, and nothing else: the number of workers does not."""

    sources: tuple[str, ...] = ()  # none: Python's own library
    tokenizer: str = "bytes"
    end_of_text: str | None = None  # None: the tokenizer's own; "": none
    split: tuple[str, ...] = (DEFAULT_SPLIT,)
    field: str = "text"
    document_start: str | None = None
    invalid_utf8: Literal["replace", "stop"] = "replace"
    shard_bytes: int = Field(default=256 * 10**6, gt=0)  # of the sources, a shard


class Progress(NamedTuple):
    done: int  # bytes on disk
    total: int  # 0: not known
    source_bytes: int
    tokens: int
    shards: int


def prepare(
    config: PrepareConfig,
    folder: Path,
    *,
    workers: int = 1,
    resume: bool = False,
    report: Callable[[Progress], None] = lambda progress: None,
) -> Manifest:
    """Make `folder`. If it is there, it must be this preparation's own, and `resume` must be asked for."""
    if workers < 1:
        raise ValueError(f"workers must be 1 or more, got {workers}")
    spec = parse_split(config.split)
    if spec.sources and config.sources:
        raise ValueError("--split names the sources; leave out the others, or give shares or bytes")
    tokenizer = load_tokenizer(config.tokenizer, config.end_of_text)
    groups = _sources_by_split(config, spec)
    plan = _plan(config, tokenizer, groups)
    with own_folder(folder, plan, resume) as (state, finished):
        if finished is not None:
            return finished
        entry = store_tokenizer(folder, tokenizer)
        try:
            state, skipped = _encode_all(config, folder, spec, groups, tokenizer, state, workers, report)
            manifest = _manifest(config, spec, entry, state, skipped)
        except NeverWhole:
            give_up(folder, state)
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
    report: Callable[[Progress], None],
) -> tuple[State, int]:
    sources = [source for group in groups.values() for source in group]
    total = 0 if any(source.name.startswith(HUB) for source in sources) else sum(source.size for source in sources)
    rule = BySize(spec.sizes) if spec.sizes else ByShare(spec.shares, total) if spec.shares else None
    tokens = sum(shard.tokens for shards in state.shards for shard in shards.values())
    dtype = dtype_for(tokenizer.vocab_size)
    stop = config.invalid_utf8 == "stop"
    arguments = (tokenizer.to_json(), tokenizer.name, tokenizer.end_of_text, config.field, stop)
    if total:
        workers = min(workers, max(1, total // WORTH_A_PROCESS))
    with ordered_pool(make_encoder, arguments, workers) as encode:
        pieces = _pieces(groups, rule, config.shard_bytes)
        for index, of_shard in groupby(pieces, key=lambda piece: piece.shard):
            if index < len(state.shards):
                for piece in of_shard:  # read again, to get to the same place
                    report(Progress(piece.done, total, state.source_bytes, tokens, index))
                continue
            invalid, source_bytes = state.invalid_utf8, state.source_bytes
            with writing_shards(folder, index, dtype, tokenizer.vocab_size) as group:
                for piece, made in encode(of_shard):
                    group.append(piece.split, made.encoded)
                    invalid, source_bytes = invalid + made.invalid, source_bytes + made.source_bytes
                    tokens += len(made.encoded.tokens)
                    report(Progress(piece.done, total, source_bytes, tokens, index))
                shards = group.finish()
            state = State(
                plan=state.plan, shards=(*state.shards, shards), invalid_utf8=invalid, source_bytes=source_bytes
            )
            write_state(folder, state)
    if isinstance(rule, BySize):
        rule.check_enough()
    return state, sum(len(source.skipped) for source in sources)


def make_encoder(content: bytes | None, name: str, end_of_text: int | None, field: str, stop: bool) -> PieceEncoder:
    return PieceEncoder(restore_tokenizer(content, name, end_of_text), field, stop)


def _pieces(groups: dict[str, list[Source]], rule: Rule | None, shard_bytes: int) -> Iterator[Piece]:
    """Everything in order. A shard ends after so many bytes of the sources, for all splits at once, so that what is
    written up to there can be kept."""
    held: dict[str, list[Part]] = {}
    sizes: dict[str, int] = {}
    shard = taken = 0
    for split, group in groups.items():
        documents = (document for source in group for document in source.documents())
        for name, part in deal(documents, rule or BySource(split)):
            held.setdefault(name, []).append(part)
            sizes[name] = sizes.get(name, 0) + len(part.data)
            taken += len(part.data)
            full = taken >= shard_bytes
            for ready in list(held) if full else [name] if sizes[name] > PART // 2 else []:
                yield Piece(ready, held.pop(ready), shard, _done(groups))
                sizes[ready] = 0
            if full:
                shard, taken = shard + 1, 0
    for name, parts in held.items():
        yield Piece(name, parts, shard, _done(groups))


def _done(groups: dict[str, list[Source]]) -> int:
    return sum(source.done for group in groups.values() for source in group)


def _sources_by_split(config: PrepareConfig, spec: SplitSpec) -> dict[str, list[Source]]:
    """Under "" what a rule deals out; else under the split's name."""
    names = spec.sources or {"": list(config.sources)}
    return {
        split: find_sources(given, field=config.field, document_start=config.document_start)
        for split, given in names.items()
    }


def _plan(config: PrepareConfig, tokenizer: Tokenizer, groups: dict[str, list[Source]]) -> dict[str, Any]:
    """Two preparations with the same plan give the same bytes."""
    files = [[split, [source.fingerprint() for source in group]] for split, group in groups.items()]
    content = tokenizer.to_json() or b""
    return {
        **config.model_dump(mode="json"),
        "tokenizer file": digest(content),
        "files": digest(json.dumps(files).encode()),
    }


def _manifest(config: PrepareConfig, spec: SplitSpec, entry: TokenizerFile, state: State, skipped: int) -> Manifest:
    splits = {name: Split(shards=tuple(group[name] for group in state.shards if name in group)) for name in spec.names}
    empty = [name for name, split in splits.items() if split.tokens < 2]
    if len(empty) == len(splits):
        raise NeverWhole("there is no text in the sources")
    if empty:
        raise NeverWhole(
            f"nothing came to {' and '.join(empty)}: these sources have too few documents for so small a part; make it "
            "larger, or give each split a source of its own, such as --split train=a.txt,valid=b.txt"
        )
    return Manifest(
        format=FORMAT,
        dtype=dtype_for(entry.vocab_size),
        tokenizer=entry,
        splits=splits,
        sources=config.sources or tuple(name for names in spec.sources.values() for name in names) or (LIBRARY,),
        invalid_utf8=state.invalid_utf8,
        skipped_files=skipped,
    )
