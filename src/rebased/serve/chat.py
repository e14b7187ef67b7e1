"""The plain chat template: messages to tokens, with the numbers of tokens after which each message ends."""

from collections.abc import Sequence
from typing import NamedTuple

from rebased.data.tokenizer import Tokenizer
from rebased.serve.schema import Message

NAMES = {"system": "System", "developer": "System", "user": "User", "assistant": "Assistant"}
STOP = "\n\nUser:"
"""Models of plain text go on with the next question; the answer ends there."""


class Chat(NamedTuple):
    """A chat as the model reads it."""

    tokens: list[int]
    marks: list[int]  # numbers of tokens after which a message ends


def render(messages: Sequence[Message], tokenizer: Tokenizer) -> Chat:
    """Return a chat as tokens: "User: Hello\\n\\nAssistant:", one paragraph per message.

    Each message is encoded by itself, so a chat that goes on begins with the tokens that it had before.
    """
    tokens: list[int] = []
    marks: list[int] = []
    for message in messages:
        tokens += tokenizer.encode(f"{NAMES[message.role]}: {message.text.strip()}\n\n")
        marks.append(len(tokens))
    tokens += tokenizer.encode("Assistant:")
    return Chat(tokens, marks)
