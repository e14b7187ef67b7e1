"""The consoles of all commands: text is shown as it is, never as rich's markup and never as codes of the terminal."""

from collections.abc import Iterable
from typing import IO, Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from rebased.config import plain


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
