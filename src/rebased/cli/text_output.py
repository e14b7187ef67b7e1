"""Text of a generation on stdout: one sequence as it comes, several one after the other."""

import sys
import unicodedata

from rich.console import Console
from rich.text import Text

from rebased.models import Generation, Token

SHOWN = 60  # characters of a prompt in a headline


class TextOutput:
    """Writes text to stdout. In a terminal the prompt stands before it, dimmed, and control characters are replaced.

    Several sequences cannot be mixed: the first that is not done is written as it comes, later ones are held.
    """

    def __init__(self, console: Console, generation: Generation) -> None:
        self._console, self._prompts, self._tokenizer = console, generation.prompts, generation.tokenizer
        self._held = [""] * len(self._prompts)
        self._ended = [False] * len(self._prompts)
        self._current = -1
        self._last = "\n"  # the last character that was written
        self._next_sequence()

    def write(self, token: Token) -> None:
        """Write the text of a token, or hold it until its sequence's turn comes."""
        self._held[token.sequence] += token.text
        self._ended[token.sequence] = token.finish_reason is not None
        if token.sequence == self._current:
            self._put_held()
            while self._current < len(self._held) and self._ended[self._current]:
                self._next_sequence()
        sys.stdout.flush()

    def close(self) -> None:
        """Write what is held, of sequences that are not done, and end the line."""
        while self._current < len(self._held):
            self._next_sequence()
        sys.stdout.flush()

    def _next_sequence(self) -> None:
        """Go on to the next sequence, and write its headline and what it has so far."""
        self._current += 1
        if len(self._held) > 1 or self._current:
            self._end_line()
        if self._current == len(self._held):
            return
        tokens = self._prompts[self._current]
        prompt = self._tokenizer.decode(tokens) if self._tokenizer else ""
        if len(self._held) > 1:
            short = prompt if len(prompt) <= SHOWN else f"{prompt[: SHOWN - 3]}..."
            headline = f"== {self._current + 1} of {len(self._held)}: {short!r}"
            self._console.print(Text(headline, "bold"), soft_wrap=True)
        elif self._console.is_terminal:
            self._console.print(Text(visible(prompt), "dim"), end="", soft_wrap=True)
            self._last = prompt[-1:] or self._last
        self._put_held()

    def _put_held(self) -> None:
        text, self._held[self._current] = self._held[self._current], ""
        if text:
            text = visible(text) if self._console.is_terminal else text
            encoding = sys.stdout.encoding or "utf-8"
            sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
            self._last = text[-1]

    def _end_line(self) -> None:
        if self._last != "\n":
            sys.stdout.write("\n")
            self._last = "\n"


def visible(text: str) -> str:
    """The text with U+FFFD in place of control characters, but line breaks and tabs: a terminal would obey them."""
    return "".join(c if c in "\n\t" or unicodedata.category(c) != "Cc" else "\ufffd" for c in text)
