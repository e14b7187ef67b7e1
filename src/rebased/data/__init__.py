"""Text for language models: prepared once as memory-mapped tokens, then read in windows in a reproducible order."""

from rebased.data.corpus import Corpus, write_corpus
from rebased.data.preparation import PrepareConfig, Progress, prepare
from rebased.data.windows import TextBatch, Windows, spread_rows, window_rows

__all__ = [
    "Corpus",
    "PrepareConfig",
    "Progress",
    "TextBatch",
    "Windows",
    "prepare",
    "spread_rows",
    "window_rows",
    "write_corpus",
]
