"""How much of a synthetic task a model gets right: exact counts of labelled tokens, overall and by parts."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rebased.mixers import eval_mode
from rebased.models import LanguageModel
from rebased.ops import linear_argmax
from rebased.tasks import IGNORE, Examples, Questions, Segment, find_questions


@torch.no_grad()
def evaluate(
    model: LanguageModel, segments: Sequence[Segment], examples: Sequence[Examples], batch_size: int
) -> dict[str, Any]:
    """The accuracy over all labelled tokens, and over parts of them, as a record keeps it. Without dropout; the model
    is left in the mode it was in.

    {"accuracy": 0.9, "by_pairs": {"4": 0.9}, "by_length": {"32": 0.9}, "slices": {"updated": 0.8, "kept": 0.95}}:
    `by_pairs` stands there for tasks whose segments have kv_pairs, `slices` for tasks that name some.
    """
    by: dict[str, dict[Any, list[int]]] = defaultdict(dict)  # [correct, total] by part of the record and key

    def add(part: str, key: Any, correct: int, total: int) -> None:
        before = by[part].get(key, (0, 0))
        by[part][key] = [before[0] + correct, before[1] + total]

    for segment, rows in zip(segments, examples, strict=True):
        questions = find_questions(rows)
        with eval_mode(model):
            predictions = predict(model, questions, batch_size)
        correct, total, slices = count_correct(predictions, questions, rows.slices)
        add("accuracy", "", correct, total)
        if "kv_pairs" in segment.settings():
            add("by_pairs", segment.settings()["kv_pairs"], correct, total)
        add("by_length", segment.seq_len, correct, total)
        for name, counts in slices.items():
            add("slices", name, *counts)
    parts = {
        part: {str(key): correct / total for key, (correct, total) in sorted(counts.items()) if total}
        for part, counts in by.items()
    }
    if not parts["accuracy"]:
        raise ValueError("these examples have no labelled token; a task must ask something in every row")
    return parts | {"accuracy": parts["accuracy"][""]}


def predict(model: LanguageModel, questions: Questions, batch_size: int) -> Tensor:
    """[N,n] int64: the likeliest token at each question, batch_size rows at a time."""
    return torch.cat(
        [
            linear_argmax(model.hidden_at(inputs, positions), model.embedding.weight).view_as(targets)
            for inputs, positions, targets in questions.split(batch_size)
        ]
    )


def count_correct(
    predictions: Tensor, questions: Questions, slices: Mapping[str, Tensor]
) -> tuple[int, int, dict[str, tuple[int, int]]]:
    """(correct, total, {slice: (correct, total)}) over the labelled tokens of all rows; waits for the device once."""
    asked = questions.targets != IGNORE  # [N,n]
    masks = [asked, *(asked & mask_at(mask, questions.positions) for mask in slices.values())]
    right = predictions == questions.targets
    counts = torch.stack([torch.stack([(mask & right).sum(), mask.sum()]) for mask in masks]).tolist()
    (correct, total), *others = counts
    return correct, total, {name: (each[0], each[1]) for name, each in zip(slices, others, strict=True)}


def mask_at(mask: Tensor, positions: Tensor) -> Tensor:
    """A slice of positions [N,T] or of rows [N], at the positions [N,n] that are asked: [N,n] bool."""
    return mask.gather(1, positions) if mask.ndim == 2 else mask.unsqueeze(1).expand_as(positions)
