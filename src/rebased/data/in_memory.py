"""Write a prepared folder from texts in memory, for small corpora and tests."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from rebased.data.encode import ChunkBatch, ChunkEncoder
from rebased.data.manifest import FORMAT, Manifest, Split, dtype_for, write_manifest
from rebased.data.shards import store_tokenizer, writing_shards
from rebased.data.splits import Chunk
from rebased.data.tokenizer import load_tokenizer


def write_corpus(folder: Path, documents: Mapping[str, Iterable[str]], tokenizer: str = "bytes") -> None:
    """Write documents, given by split, to a new or empty folder that `Corpus` can read.

    For example {"train": ["one document", "another"], "valid": ["a third"]}. `prepare` does this for files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty; choose another folder")
    loaded = load_tokenizer(tokenizer)
    encode = ChunkEncoder(loaded, field="", stop_at_invalid=True)
    dtype, entry = dtype_for(loaded.vocab_size), store_tokenizer(folder, loaded)
    with writing_shards(folder, 0, dtype, loaded.vocab_size) as group:
        for split, texts in documents.items():
            chunks = [Chunk("text", text.encode(), True, "memory", "") for text in texts]
            group.append(split, encode(ChunkBatch(split, chunks, 0, 0)).encoded)
        shards = group.finish()
    splits = {split: Split(shards=(shard,)) for split, shard in shards.items()}
    write_manifest(folder, Manifest(format=FORMAT, dtype=dtype, tokenizer=entry, splits=splits))
