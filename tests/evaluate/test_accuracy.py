"""Accuracy counts labelled tokens, each with the same weight, overall and by parts."""

import pytest
import torch
from torch import Tensor

from rebased.evaluate.accuracy import count_correct, evaluate, mask_at
from rebased.models import LanguageModel, LMConfig
from rebased.tasks import IGNORE, MQAR, Examples, Questions, find_questions, task_data

LABELS = torch.tensor([[IGNORE, 5, 6], [7, IGNORE, IGNORE]])
MQARData = task_data("mqar")


def questions() -> Questions:
    return find_questions(Examples(torch.zeros(2, 3, dtype=torch.int64), LABELS))


def test_only_labelled_tokens_count() -> None:
    predictions = torch.tensor([[5, 9], [7, IGNORE]])  # of [[5, 6], [7, none]]
    assert count_correct(predictions, questions(), {}) == (2, 3, {})
    assert all(type(count) is int for count in count_correct(predictions, questions(), {})[:2])


def test_the_truth_is_all_correct() -> None:
    found = find_questions(MQAR(seq_len=32, kv_pairs=8).build(10, seed=0))
    assert count_correct(found.targets, found, {}) == (80, 80, {})


def test_slices_are_of_positions_or_of_rows() -> None:
    predictions = torch.tensor([[5, 9], [7, 1]])
    slices = {
        "late": torch.tensor([[False, False, True], [True, True, True]]),
        "first": torch.tensor([True, False]),
        "none": torch.zeros(2, 3, dtype=torch.bool),
    }
    found = count_correct(predictions, questions(), slices)
    assert found == (2, 3, {"late": (1, 2), "first": (1, 2), "none": (0, 0)})
    positions = questions().positions
    assert mask_at(slices["first"], positions).tolist() == [[True, True], [False, False]]
    assert mask_at(slices["late"], positions).tolist() == [[False, True], [True, True]]


class Knows:
    """Stands for a model: says the token of its table, at every position, and remembers its mode."""

    def __init__(self, answer: int) -> None:
        self.model = LanguageModel(LMConfig(vocab_size=24, d_model=24, max_len=16, mixers=("attention",)))
        with torch.no_grad():
            self.model.embedding.weight.copy_(torch.eye(24))
        hidden = torch.eye(24)[answer]
        self.model.hidden_at = lambda inputs, positions: hidden.expand(positions.numel(), 24)  # type: ignore


def examples(labels: list[list[int]], slices: dict[str, Tensor] | None = None) -> Examples:
    return Examples(torch.zeros(len(labels), len(labels[0]), dtype=torch.int64), torch.tensor(labels), slices or {})


def test_a_record_has_accuracies_by_pairs_length_and_slices() -> None:
    segments = [
        MQARData.segment_type.model_validate({"seq_len": T, "kv_pairs": n, "examples": 2})
        for T, n in ((8, 2), (8, 1), (12, 2))
    ]
    seven, other = [7, IGNORE, 7, 3], [IGNORE, 3, IGNORE, IGNORE]
    rows = [
        examples([seven, other], {"odd": torch.tensor([False, True]), "empty": torch.tensor([False, False])}),
        examples([seven, seven], {"odd": torch.tensor([True, False]), "empty": torch.tensor([False, False])}),
        examples([other, other], {"odd": torch.tensor([True, True]), "empty": torch.tensor([False, False])}),
    ]
    model = Knows(7).model
    for batch_size in (1, 2, 7):
        found = evaluate(model, segments, rows, batch_size)
        assert found == {
            "accuracy": 6 / 12,
            "by_pairs": {"1": 4 / 6, "2": 2 / 6},
            "by_length": {"8": 6 / 10, "12": 0.0},
            "slices": {"odd": 2 / 6},
        }
        assert list(found) == ["accuracy", "by_pairs", "by_length", "slices"]
    assert model.training
    assert "slices" not in evaluate(model, segments[:1], [examples([seven, other])], 2)


def test_examples_that_ask_nothing_have_no_accuracy() -> None:
    segment = MQARData.segment_type.model_validate({"seq_len": 8, "kv_pairs": 2, "examples": 1})
    with pytest.raises(ValueError, match="no labelled token; a task must ask something"):
        evaluate(Knows(7).model, [segment], [examples([[IGNORE] * 4])], 2)
