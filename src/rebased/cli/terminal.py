"""The consoles of all commands: text is shown as it is, never as rich's markup and never as codes of the terminal."""

from collections.abc import Iterable
from typing import IO, Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

_UNSAFE = (
    *(code for code in range(0x20) if chr(code) not in "\n\t"),
    *range(0x7F, 0xA0),  # DEL and the second set of control characters
    *range(0x202A, 0x202F),  # these and the next four turn the direction of text
    *range(0x2066, 0x206A),
    *range(0xD800, 0xE000),  # halves of pairs, which no encoding can write
)
_SHOWN = {code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" for code in _UNSAFE}


def plain(text: str) -> str:
    """The text with every control character written out: an escape code becomes the four characters \\x1b."""
    return text.translate(_SHOWN)


class Terminal(Console):
    """A rich console for texts that others wrote: names, paths, messages and numbers of files.

    Square brackets are square brackets, :words: are not emoji, and control characters are written out. Styles are given
    as styles (`Text`, `style=`), never as markup. A progress column takes `markup=False`.
    """

    def __init__(self, *, stderr: bool = False, quiet: bool = False, file: IO[str] | None = None) -> None:
        super().__init__(stderr=stderr, quiet=quiet, file=file, markup=False, emoji=False)

    def render_str(self, text: str, **options: Any) -> Text:
        """The text as rich shows it, for a cell or a title. Rich alone would drop some control characters."""
        return super().render_str(plain(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The segments of a renderable. Those that move the cursor are rich's own; all others are cleaned."""
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield Segment(plain(segment.text), segment.style)
