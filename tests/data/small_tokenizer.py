"""A byte-level BPE tokenizer with GPT-NeoX's rules and a few hundred tokens, trained when it is needed."""

from functools import lru_cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

TEXT = [
    "It's the first line, and the second isn't; they're 12 of 345 in all.\n",
    "def function(argument):\n    return argument + 1  # a comment\n",
    "naïve café Ωmega 漢字 the then there THE The",
]


@lru_cache
def small_tokenizer_json(*, normalize: bool = True, spaces: bool = True, vocab_size: int = 400) -> bytes:
    tokenizer = Tokenizer(models.BPE())
    if normalize:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"])
    tokenizer.train_from_iterator(TEXT * 20, trainer)
    if spaces:
        tokenizer.add_tokens([AddedToken(" " * n, normalized=True) for n in (2, 3, 4, 8)])
    return tokenizer.to_str().encode()


def write_small_tokenizer(path: Path) -> Path:
    path.write_bytes(small_tokenizer_json())
    return path
