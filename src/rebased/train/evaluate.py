"""How much a model recalls."""

from collections.abc import Sequence
from typing import Any

import torch

from rebased.models import LanguageModel
from rebased.tasks import Examples, RecallMeter, Segment, count_correct


@torch.no_grad()
def evaluate(
    model: LanguageModel, segments: Sequence[Segment], examples: Sequence[Examples], batch_size: int
) -> RecallMeter:
    """Count the labelled tokens that the model gets right, without dropout. The model is left in the mode it was in."""
    meter, training = RecallMeter(), model.training
    model.eval()
    for segment, (inputs, labels) in zip(segments, examples, strict=True):
        for x, y in zip(inputs.split(batch_size), labels.split(batch_size), strict=True):
            logits, targets = model.logits_at_labels(x, y)
            meter.update(segment.seq_len, segment.kv_pairs, *count_correct(logits.argmax(-1), targets))
    model.train(training)
    return meter


def accuracies(meter: RecallMeter) -> dict[str, Any]:
    """A meter as a record holds it: overall, and slice by slice."""
    return {
        "accuracy": meter.accuracy(),
        "by_pairs": {str(pairs): value for pairs, value in meter.by_pairs().items()},
        "by_length": {str(length): value for length, value in meter.by_length().items()},
    }
