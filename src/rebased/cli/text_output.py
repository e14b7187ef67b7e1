"""Text of a generation on stdout: one sequence as it comes, several one after the other."""

import sys
import unicodedata

from rich.console import Console
from rich.text import Text

from rebased.config import plural
from rebased.models import Generation, Token

SHOWN = 60  # characters of a prompt in a headline


class TextOutput:
    """Writes text to stdout. In a terminal the prompt stands before it, dimmed, and control characters are replaced.

    Several sequences cannot be mixed: the first that is not done is written as it comes, later ones are held.
    """

    def __init__(self, console: Console, generation: Generation, *, silent: bool) -> None:
        self._console, self._generation, self._silent = console, generation, silent
        self._plain = not console.is_terminal
        self._count = len(generation.prompts)
        self._held = [""] * self._count
        self._ended = [False] * self._count
        self._current = -1
        self._last = "\n"  # the last character that was written
        self._next_sequence()

    def write(self, token: Token) -> None:
        """Write the text of a token, or hold it until its sequence's turn comes."""
        self._held[token.sequence] += token.text
        self._ended[token.sequence] = token.finish_reason is not None
        while self._current < self._count:
            self._put(self._held[self._current])
            self._held[self._current] = ""
            if not self._ended[self._current]:
                break
            self._next_sequence()
        sys.stdout.flush()

    def close(self) -> None:
        """Write what is held, of sequences that are not done, and end the line."""
        while self._current < self._count:
            self._put(self._held[self._current])
            self._next_sequence()
        if not self._silent:
            self._end_line()
            sys.stdout.flush()

    def summarise(self, made: int, seconds: float) -> None:
        """Say on stderr how much was written, in a terminal."""
        on = Console(stderr=True, highlight=False)
        if not self._plain and made:
            size = self._generation.state_bytes / self._generation.slots
            rate = f"{plural(made, 'token')} in {seconds:.1f} s, {made / seconds:,.0f} tokens/s"
            on.print(f"{rate}; a sequence's state takes {size / 1e6:,.2f} MB", style="dim", soft_wrap=True)

    def _next_sequence(self) -> None:
        self._current += 1
        if self._silent or self._current >= self._count:
            return
        prompt = self._prompt(self._current)
        if self._count > 1:
            self._end_line()
            short = prompt if len(prompt) <= SHOWN else f"{prompt[: SHOWN - 3]}..."
            headline = f"== {self._current + 1} of {self._count}: {short!r}"
            self._console.print(Text(headline, "bold"), soft_wrap=True)
        elif not self._plain:
            self._console.print(Text(visible(prompt), "dim"), end="", soft_wrap=True)
            self._last = prompt[-1:] or self._last

    def _prompt(self, number: int) -> str:
        tokenizer = self._generation.tokenizer
        return tokenizer.decode(self._generation.prompts[number]) if tokenizer else ""

    def _put(self, text: str) -> None:
        if self._silent or not text:
            return
        text = text if self._plain else visible(text)
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
