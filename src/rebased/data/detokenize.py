"""Text out of tokens that come one by one: characters are held until they are whole, and stop strings are found."""

import codecs
from collections.abc import Sequence

from rebased.data.tokenizer import ByteTokenizer, Tokenizer

PENDING = 32  # tokens that are held at most: so many without a whole character are no text


class Detokenizer:
    """Turns tokens into text piece by piece. All pieces together are what tokenizer.decode gives for all tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace") if isinstance(tokenizer, ByteTokenizer) else None
        self._context: list[int] = []  # tokens whose text is out: a token may look different without one before it
        self._held: list[int] = []

    def push(self, *tokens: int) -> str:
        """Return the text that becomes whole with these tokens; empty while a character lacks bytes."""
        if self._bytes is not None:
            return self._bytes.decode(bytes([token for token in tokens if token < 256]))
        held = self._held
        self._held = [*held, *tokens]
        text = self._new_text()
        whole = not text.endswith("\ufffd")
        if text and (whole or (len(tokens) == 1 and len(self._held) >= PENDING)):
            self._context, self._held = self._held, []
            return text
        if len(tokens) < 2:
            return ""
        self._held = held  # some of them may be whole
        return "".join(map(self.push, tokens))

    def finish(self) -> str:
        """Return what is held still; a character that lacks bytes becomes U+FFFD."""
        if self._bytes is not None:
            return self._bytes.decode(b"", final=True)
        text = self._new_text()
        self._context, self._held = self._held, []
        return text

    def _new_text(self) -> str:
        before = self._tokenizer.decode(self._context)
        return self._tokenizer.decode([*self._context, *self._held])[len(before) :]


class StopStrings:
    """Passes text on up to the first of `stops`, without it.

    The end of a text that may be the beginning of a stop string is held until it is decided.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if any(not isinstance(stop, str) or not stop for stop in stops):
            raise ValueError("a stop string is empty; give one or more characters")
        self._stops = tuple(stops)
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """Return the text that can be passed on. `found` is set once a stop string is there."""
        if self.found is not None:
            return ""
        self._held += text
        places = [(self._held.find(stop), stop) for stop in self._stops if stop in self._held]
        if places:
            place, self.found = min(places, key=lambda each: (each[0], -len(each[1])))
            out, self._held = self._held[:place], ""
            return out
        longest = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        cut = len(self._held) - longest
        out, self._held = self._held[:cut], self._held[cut:]
        return out

    def finish(self) -> str:
        """Return what is held still: the text is over, so no stop string can follow."""
        out, self._held = self._held, ""
        return out


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of `text` are the beginning of `stop`, fewer than all of it."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


class TextStream:
    """The text of one sequence of tokens, up to a stop string. It stays empty without a tokenizer."""

    def __init__(self, tokenizer: Tokenizer | None, stops: Sequence[str]) -> None:
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer)
        self._stops = StopStrings(stops)

    @property
    def stopped(self) -> bool:
        """Whether a stop string has occurred."""
        return self._stops.found is not None

    def push(self, *tokens: int) -> str:
        """Return the text that these tokens add; where there are stop strings, give one token at a time."""
        return "" if self._detokenizer is None else self._stops.push(self._detokenizer.push(*tokens))

    def finish(self) -> str:
        """Return what is held still, when no token follows."""
        if self._detokenizer is None or self.stopped:
            return ""
        text = self._stops.push(self._detokenizer.finish())
        return text + self._stops.finish()
