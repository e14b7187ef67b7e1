"""What a model is trained and judged on."""

from rebased.tasks.batches import Batch, epoch_batches
from rebased.tasks.mqar import IGNORED, MQAR, PAIRS_BY_LENGTH, Examples
from rebased.tasks.recall import RecallMeter, count_correct
from rebased.tasks.splits import MQARData, Segment, Splits

__all__ = [
    "IGNORED",
    "MQAR",
    "PAIRS_BY_LENGTH",
    "Batch",
    "Examples",
    "MQARData",
    "RecallMeter",
    "Segment",
    "Splits",
    "count_correct",
    "epoch_batches",
]
