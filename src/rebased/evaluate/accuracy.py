"""How much a model recalls."""

from collections.abc import Sequence
from typing import Any

import torch

from rebased.evaluate.meter import RecallMeter
from rebased.models import LanguageModel
from rebased.ops import linear_argmax
from rebased.tasks import IGNORED, Examples, Segment, find_questions


@torch.no_grad()
def evaluate(
    model: LanguageModel, segments: Sequence[Segment], examples: Sequence[Examples], batch_size: int
) -> RecallMeter:
    """Count the labelled tokens that the model gets right, without dropout. The model is left in the mode it was in."""
    meter, training = RecallMeter(), model.training
    model.eval()
    for segment, rows in zip(segments, examples, strict=True):
        questions = find_questions(rows)
        counts = torch.zeros(2, dtype=torch.int64, device=rows.inputs.device)  # read once a segment
        for inputs, positions, targets in questions.split(batch_size):
            predictions = linear_argmax(model.hidden_at(inputs, positions), model.embedding.weight).view_as(targets)
            counts += torch.stack([(predictions == targets).sum(), (targets != IGNORED).sum()])
        correct, total = counts.tolist()
        meter.update(segment.seq_len, segment.kv_pairs, correct, total)
    model.train(training)
    return meter


def accuracies(meter: RecallMeter) -> dict[str, Any]:
    """A meter as a record holds it: overall, and slice by slice."""
    return {
        "accuracy": meter.accuracy(),
        "by_pairs": {str(pairs): value for pairs, value in meter.by_pairs().items()},
        "by_length": {str(length): value for length, value in meter.by_length().items()},
    }
