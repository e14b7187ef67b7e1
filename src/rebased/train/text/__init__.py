"""Language modelling: a model trained on windows of text, and measured on them."""

from rebased.train.text.config import TextData, TextRunConfig, TextTrain
from rebased.train.text.loop import TextResult, train_text
from rebased.train.text.sinks import TextSink, TextStart
from rebased.train.text.world import ToldElsewhere

__all__ = [
    "TextData",
    "TextResult",
    "TextRunConfig",
    "TextSink",
    "TextStart",
    "TextTrain",
    "ToldElsewhere",
    "train_text",
]
