"""The prepared text of a run: checked before training, and described in the record for a resumed run to compare."""

import hashlib
from typing import Any

from rebased.data import Corpus
from rebased.runs.lm_config import LMRunConfig


def open_corpus(config: LMRunConfig, *, verify: bool = True) -> Corpus:
    """The corpus of a run. Raises ValueError if it is missing, lacks a split, or does not fit the model.

    With `verify` the checksums of a small corpus are compared too; one of several processes is enough.
    """
    folder = config.data.folder
    if not folder.exists():
        text = "" if folder.name == "stdlib" else "YOUR_TEXT "
        raise ValueError(
            f"data.folder {folder} does not exist; make it with: rebased data prepare {text}-o {folder}, or say where "
            "it is with --data.folder"
        )
    corpus = Corpus(folder)
    if corpus.vocab_size > config.model.vocab_size:
        raise ValueError(
            f"{folder} was made with the tokenizer {corpus.manifest.tokenizer.name}, which has {corpus.vocab_size:,} "
            f"tokens, but model.vocab_size is {config.model.vocab_size:,}; set it to {corpus.vocab_size} or more, "
            "or prepare the text with the tokenizer that the model is for"
        )
    tokens = corpus.splits["train"].tokens if "train" in corpus.splits else 0
    if 0 < tokens <= config.data.seq_len:
        raise ValueError(
            f"data.seq_len {config.data.seq_len:,}: {folder} has only {tokens:,} tokens to train on, less than one "
            "window; choose a shorter data.seq_len, or prepare more text"
        )
    for split in ("train", "valid"):
        corpus.windows(split, config.data.seq_len)  # raises ValueError if the split is missing or empty
    if verify:
        corpus.verify_if_small()
    return corpus


def describe_corpus(corpus: Corpus) -> dict[str, Any]:
    """The corpus as the record describes it: checksum, tokenizer and sizes, but no path."""
    shards = [(name, shard.token_file.sha256) for name, split in corpus.splits.items() for shard in split.shards]
    return {
        "sha256": hashlib.sha256(repr(shards).encode()).hexdigest(),
        "tokenizer": corpus.manifest.tokenizer.name,
        "vocab_size": corpus.vocab_size,
        "vocabulary": corpus.vocabulary,
        "tokens": {name: split.tokens for name, split in corpus.splits.items()},
        "text_bytes": {name: split.text_bytes for name, split in corpus.splits.items()},
    }
