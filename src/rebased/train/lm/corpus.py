"""The prepared text of a run: held against its model before anything begins, and known again when it goes on."""

import hashlib
import logging
from typing import Any

from rebased.data import Corpus
from rebased.runs.lm_config import TextRunConfig

logger = logging.getLogger("rebased")


def open_corpus(config: TextRunConfig, *, verify: bool = True) -> Corpus:
    """The corpus, if it is there, has the splits that a run needs and the model has a row for each of its tokens.
    One of several processes has to `verify` its checksums."""
    folder = config.data.folder
    if not folder.exists():
        raise ValueError(f"data.folder {folder} is not there; make it with: rebased data prepare -o {folder}")
    corpus = Corpus(folder)
    if corpus.vocab_size > config.model.vocab_size:
        raise ValueError(
            f"{folder} was made with the tokenizer {corpus.manifest.tokenizer.name}, which has {corpus.vocab_size:,} "
            f"tokens, and the model has model.vocab_size {config.model.vocab_size:,}; set it to {corpus.vocab_size} or "
            "more, or prepare the text with the tokenizer that the model is for"
        )
    tokens = corpus.splits["train"].tokens if "train" in corpus.splits else 0
    if 0 < tokens <= config.data.seq_len:
        raise ValueError(
            f"data.seq_len {config.data.seq_len:,}: {folder} has {tokens:,} tokens to train on, which fill no window; "
            "make windows shorter, or prepare more text"
        )
    for split in ("train", "valid"):
        corpus.windows(split, config.data.seq_len)  # says what is wrong
    if verify and not corpus.verify_if_small():
        logger.info("%s is large: its checksums were not compared; rebased data check does that", folder)
    return corpus


def describe_corpus(corpus: Corpus) -> dict[str, Any]:
    """What the record keeps of it: enough to tell another text from this one, and nothing about where it lies."""
    shards = [(name, shard.token_file.sha256) for name, split in corpus.splits.items() for shard in split.shards]
    return {
        "sha256": hashlib.sha256(repr(shards).encode()).hexdigest(),
        "tokenizer": corpus.manifest.tokenizer.name,
        "vocab_size": corpus.vocab_size,
        "vocabulary": corpus.vocabulary,
        "tokens": {name: split.tokens for name, split in corpus.splits.items()},
        "text_bytes": {name: split.text_bytes for name, split in corpus.splits.items()},
    }
