"""Which of a run's many accuracies is its result."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

Protocol = Literal["paper", "held_out"]
"""Both choose the epoch whose accuracy on the test split is best. `paper` reports that accuracy, which has been
selected for; `held_out` reports the same epoch's accuracy on the held-out split, which has not."""


class Reported(NamedTuple):
    accuracy: float
    epoch: int


def reported(epochs: Sequence[dict[str, Any]], protocol: Protocol) -> Reported:
    """The result of a run's epoch records; of equally good epochs the first."""
    if not epochs:
        raise ValueError("there is no result before the first epoch has ended")
    best = max(epochs, key=lambda line: line["test"]["accuracy"])
    split = "test" if protocol == "paper" else "held_out"
    if split not in best:
        raise ValueError("these records have no held-out accuracy: the run was made without task.held_out")
    return Reported(best[split]["accuracy"], best["epoch"])
