"""Accuracy counts labelled tokens, each with the same weight."""

import pytest
import torch

from rebased.evaluate.meter import RecallMeter, count_correct
from rebased.tasks import IGNORED, MQAR


def test_only_labelled_tokens_count() -> None:
    labels = torch.tensor([[IGNORED, 5, 6], [7, IGNORED, IGNORED]])
    predictions = torch.tensor([[IGNORED, 5, 9], [7, 1, IGNORED]])
    assert count_correct(predictions, labels) == (2, 3)
    labelled = labels != IGNORED
    assert count_correct(predictions[labelled], labels[labelled]) == (2, 3)
    assert all(type(count) is int for count in count_correct(predictions, labels))


def test_the_truth_is_all_correct() -> None:
    _, labels = MQAR(seq_len=32, kv_pairs=8).build(10, seed=0)
    assert count_correct(labels, labels) == (80, 80)


def test_shapes_that_would_broadcast_are_refused() -> None:
    with pytest.raises(ValueError, match=r"predictions \[3\] and labels \[2, 3\] differ in shape.*argmax"):
        count_correct(torch.zeros(3), torch.zeros(2, 3))


def test_slices_and_their_sum() -> None:
    meter = RecallMeter()
    meter.update(128, 16, 10, 10)
    meter.update(256, 16, 0, 10)
    meter.update(256, 64, 30, 60)
    meter.update(256, 64, 6, 20)
    assert meter.accuracy() == pytest.approx(46 / 100)
    assert meter.by_pairs() == {16: 0.5, 64: 36 / 80}
    assert meter.by_length() == {128: 1.0, 256: 36 / 90}


def test_an_empty_meter_has_no_accuracy() -> None:
    for read in (RecallMeter().accuracy, RecallMeter().by_pairs, RecallMeter().by_length):
        with pytest.raises(ValueError, match="no labelled token was counted yet: call update first"):
            read()


@pytest.mark.parametrize(("correct", "total"), [(3, 2), (-1, 2)])
def test_impossible_counts_are_refused(correct: int, total: int) -> None:
    with pytest.raises(ValueError, match=f"got correct={correct}, total={total}"):
        RecallMeter().update(256, 64, correct, total)
