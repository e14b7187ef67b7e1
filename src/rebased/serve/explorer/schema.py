"""The bodies of the explorer's requests, each with its bounds."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

MAX_TOKENS = 256
"""Tokens of a sequence: its attention matrix is drawn with a row per token."""
MAX_PAIRS = MAX_TOKENS // 4
MAX_CHARACTERS = 20_000
BODY_BYTES = 2**17

Token = Annotated[int, Field(ge=0, lt=2**31)]
Tokens = Annotated[list[Token], Field(min_length=1, max_length=MAX_TOKENS)]


class ModelBody(BaseModel):
    """What every request says: which model it is about."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str = Field(max_length=5000)


class CurveBody(ModelBody):
    """Measure recall at one number of pairs."""

    pairs: int = Field(ge=1, le=MAX_PAIRS)
    seq_len: int = Field(ge=4, le=MAX_TOKENS)


class SequenceBody(CurveBody):
    """Draw an MQAR sequence of so many pairs."""

    seed: int = Field(0, ge=0, lt=2**31)


class RecallBody(ModelBody):
    """Read a sequence of keys, values and questions."""

    tokens: Tokens


class TextBody(ModelBody):
    """Read a text."""

    text: str = Field(min_length=1, max_length=MAX_CHARACTERS)


class AttentionBody(ModelBody):
    """Show the attention matrix of one layer: of one head, or the mean of all heads where none is named."""

    tokens: Tokens
    layer: int = Field(ge=0)
    head: int | None = Field(None, ge=0)
