"""TF32 beside fp32: the paired test that is the reason why the page states TF32 and counts it as no departure."""

from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from rebased.analysis.intervals import Interval, t_interval
from rebased.files import read_json

STATED = "precision tf32 instead of fp32"
"""A difference from the paper, in the words of `deviations`, that lowers no verdict."""
DOCUMENT = "docs/measurements/training_step.md"


class PrecisionTest(NamedTuple):
    """ReBased on Table 1's task, trained in both precisions with the same seeds."""

    fp32: dict[int, float]  # accuracy by seed
    tf32: dict[int, float]
    d_model: int
    epochs: int
    record: str  # the name of the file

    @property
    def differences(self) -> list[float]:
        """The accuracy in TF32 less that in fp32, seed by seed."""
        return [self.tf32[seed] - self.fp32[seed] for seed in self.fp32]

    @property
    def interval(self) -> Interval:
        """Student's 95 % interval of the mean difference."""
        return t_interval(self.differences)

    def __str__(self) -> str:
        return (
            "TF32 products instead of fp32 are stated and are no departure: they are how a run is computed, not what "
            f"it computes. With {len(self.fp32)} paired seeds of ReBased (T = 256, D = {self.d_model}, {self.epochs} "
            f"epochs) the accuracy in TF32 less that in fp32 was {fmean(self.differences):+.3f} (95 % interval "
            f"{self.interval.low:.3f} to {self.interval.high:.3f}; {DOCUMENT}, {self.record}). That is one "
            "cell: smaller differences are possible, and the page never mixes runs of both. bf16 is a departure."
        )


def load_precision_test(path: Path) -> PrecisionTest:
    """The test in a file that `json.dumps(test._asdict())` wrote."""
    saved = read_json(path)
    for name in ("fp32", "tf32"):
        saved[name] = {int(seed): value for seed, value in saved[name].items()}
    return PrecisionTest(**saved)
