"""What a model is trained and judged on."""

from rebased.tasks.ar import ARRule, ar_mask, distance_to_previous
from rebased.tasks.batches import Batch, epoch_batches
from rebased.tasks.mqar import IGNORED, MQAR, PAIRS_BY_LENGTH, Examples
from rebased.tasks.ngrams import NgramCounts, count_ngrams
from rebased.tasks.perplexity import TextScores
from rebased.tasks.questions import Questions, find_questions
from rebased.tasks.recall import RecallMeter, count_correct
from rebased.tasks.splits import MQARData, Segment, Splits

__all__ = [
    "IGNORED",
    "MQAR",
    "PAIRS_BY_LENGTH",
    "ARRule",
    "Batch",
    "Examples",
    "MQARData",
    "NgramCounts",
    "Questions",
    "RecallMeter",
    "Segment",
    "Splits",
    "TextScores",
    "ar_mask",
    "count_correct",
    "count_ngrams",
    "distance_to_previous",
    "epoch_batches",
    "find_questions",
]
