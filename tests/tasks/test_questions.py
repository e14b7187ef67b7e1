"""Where labels stand and what they are, written out."""

import pytest
import torch

from rebased.tasks import IGNORE, MQAR, Examples, find_questions
from rebased.tasks import batches as module


def test_mqar_rows_have_a_question_a_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    examples = MQAR(seq_len=24, kv_pairs=5, vocab_size=32).build(11, seed=0)
    monkeypatch.setattr(module, "BLOCK_ROWS", 4)
    inputs, positions, targets = find_questions(examples)
    assert inputs is examples.inputs
    assert positions.shape == targets.shape == (11, 5)
    for row in range(11):
        at = [t for t in range(24) if examples.labels[row, t] != IGNORE]
        assert positions[row].tolist() == at
        assert targets[row].tolist() == examples.labels[row, at].tolist()


def test_rows_with_fewer_questions_are_filled_up() -> None:
    labels = torch.tensor([[IGNORE, 7, IGNORE, 8], [IGNORE] * 4, [IGNORE, IGNORE, IGNORE, 9]])
    found = find_questions(Examples(torch.arange(12).view(3, 4), labels))
    assert found.positions.tolist() == [[1, 3], [0, 0], [3, 0]]
    assert found.targets.tolist() == [[7, 8], [IGNORE] * 2, [9, IGNORE]]
    taken = found.take(torch.tensor([2, 0]))
    assert taken.inputs.tolist() == [[8, 9, 10, 11], [0, 1, 2, 3]]
    assert [part.targets.tolist() for part in taken.split(1)] == [[[9, IGNORE]], [[7, 8]]]
