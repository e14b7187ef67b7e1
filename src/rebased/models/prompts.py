"""Prompts as tokens: text or token ids, one prompt or many, checked against the model."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from rebased.data.tokenizer import Tokenizer
from rebased.models.config import LMConfig


class TooLong(ValueError):
    """A prompt has more tokens than the model has positions."""


Prompts = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]] | Tensor


def read_prompts(
    prompts: Prompts, tokenizer: Tokenizer | None, config: LMConfig, end_of_text: int | None
) -> list[list[int]]:
    """Return the tokens of each prompt, checked against a model's config.

    `prompts` is a text, tokens, or a sequence of either; or a tensor [T] or [B,T]. A prompt without tokens becomes the
    end-of-text token alone.
    """
    given: Any = prompts.tolist() if isinstance(prompts, Tensor) else prompts
    if isinstance(given, str) or _are_whole(given):
        given = [given]
    if len(given) == 0:
        raise ValueError("there are no prompts; give a list of at least one, such as ['']")
    vocab_size, limit = config.vocab_size, config.length_limit
    read = []
    for number, prompt in enumerate(given, 1):
        this = f"prompt {number} of {len(given)}" if len(given) > 1 else "the prompt"
        if isinstance(prompt, str) and tokenizer is None:
            raise ValueError("a prompt of text needs a tokenizer; give tokenizer=..., or a list of token ids")
        if isinstance(prompt, str) and tokenizer is not None:
            tokens = tokenizer.encode(prompt)
        else:
            tokens = prompt.tolist() if isinstance(prompt, Tensor) else list(prompt)
        if tokens and not (_are_whole(tokens) and min(tokens) >= 0 and max(tokens) < vocab_size):
            wrong = next(each for each in tokens if not _are_whole([each]) or not 0 <= each < vocab_size)
            raise ValueError(f"{this} has the token {wrong!r}; the model's are 0 to {vocab_size - 1}")
        if not tokens:
            if end_of_text is None:
                raise ValueError(
                    f"{this} is empty, and there is no end-of-text token that a text could begin with; give "
                    "one as end_of_text, or a prompt"
                )
            tokens = [end_of_text]
        if limit is not None and len(tokens) > limit:
            raise TooLong(f"{this} has {len(tokens):,} tokens, more than the model's {limit:,} positions; shorten it")
        read.append(tokens if set(map(type, tokens)) == {int} else [int(token) for token in tokens])
    return read


def _are_whole(values: Any) -> bool:
    """Whether there are values, all of them whole numbers."""
    kinds = set(map(type, values))  # a request may have many thousand tokens: each is looked at once, by C
    return len(values) > 0 and all(hasattr(kind, "__index__") and not issubclass(kind, bool | Tensor) for kind in kinds)
