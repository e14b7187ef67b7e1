"""Answers are counted in total and by distance, in classes of powers of two."""

import pytest

from rebased.evaluate.facts.model_answers import Answer, Tally, tally, tally_by_distance


def test_tallies() -> None:
    answers = [
        Answer(0, 3, True, 1.0, 2),
        Answer(1, 2, False, 4.0, 1),
        Answer(2, 4, True, 0.5, 1),
        Answer(3, 0, True, 9.0, 1),
    ]
    assert tally(answers) == Tally(4, 3, 14.5 / 4, 0, 4)
    assert tally(answers).accuracy == 0.75
    assert tally_by_distance(answers) == [Tally(2, 1, 2.5, 2, 3), Tally(1, 1, 0.5, 4, 7)]
    with pytest.raises(ValueError, match="no answer"):
        tally([])
