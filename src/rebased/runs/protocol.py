"""Which of a run's accuracies is its result: the two protocols."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

Protocol = Literal["paper", "held_out"]
"""Both choose the epoch with the best accuracy on the test split. `paper` reports that accuracy, although it was used
for the choice. `held_out` reports the accuracy of the same epoch on the held-out split, which was not."""


class Reported(NamedTuple):
    """The result of a run, and the epoch it was reached in."""

    accuracy: float
    epoch: int


def reported(epochs: Sequence[dict[str, Any]], protocol: Protocol) -> Reported:
    """The result of a run, from the lines of its epochs. The first of equally good epochs is chosen."""
    if not epochs:
        raise ValueError("there is no result before the first epoch has ended")
    best = max(epochs, key=lambda line: line["test"]["accuracy"])
    split = "test" if protocol == "paper" else "held_out"
    if split not in best:
        raise ValueError("this record has no held-out accuracy: the run was trained without task.held_out")
    return Reported(best[split]["accuracy"], best["epoch"])
