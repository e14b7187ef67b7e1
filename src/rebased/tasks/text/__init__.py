"""Text for language models: prepared once into memory-mapped tokens, then read in windows in a fixed order."""

from rebased.tasks.text.corpus import Corpus
from rebased.tasks.text.memory import write_corpus
from rebased.tasks.text.preparation import PrepareConfig, Progress, prepare
from rebased.tasks.text.windows import TextBatch, Windows, window_rows

__all__ = [
    "Corpus",
    "PrepareConfig",
    "Progress",
    "TextBatch",
    "Windows",
    "prepare",
    "window_rows",
    "write_corpus",
]
