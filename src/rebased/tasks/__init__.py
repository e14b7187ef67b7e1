"""Synthetic tasks: sequences that ask a model to recall what it has read."""

from rebased.tasks.batches import Batch, epoch_batches
from rebased.tasks.mqar import IGNORED, MQAR, PAIRS_BY_LENGTH, Examples
from rebased.tasks.questions import Questions, find_questions
from rebased.tasks.splits import MQARData, Segment, Splits

__all__ = [
    "IGNORED",
    "MQAR",
    "PAIRS_BY_LENGTH",
    "Batch",
    "Examples",
    "MQARData",
    "Questions",
    "Segment",
    "Splits",
    "epoch_batches",
    "find_questions",
]
