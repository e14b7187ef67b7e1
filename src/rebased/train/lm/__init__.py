"""Language modelling: a model trained on windows of text, and measured on them."""

from rebased.train.lm.loop import TextResult, train_text
from rebased.train.lm.sinks import TextSink, TextStart
from rebased.train.lm.world import ToldElsewhere

__all__ = [
    "TextResult",
    "TextSink",
    "TextStart",
    "ToldElsewhere",
    "train_text",
]
