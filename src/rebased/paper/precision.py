"""TF32 beside fp32: a test of equivalence. Unless it passes, TF32 is a departure from the paper's protocol."""

from pathlib import Path
from typing import NamedTuple

from rebased.analysis.spread import Spread, describe
from rebased.files import read_json
from rebased.paper.verdict import is_within
from rebased.report.reference_values import MARGIN

TF32 = "precision tf32 instead of fp32"  # in the words of `deviations`


class PrecisionTest(NamedTuple):
    """ReBased on Table 1's task, trained in both precisions with the same seeds."""

    fp32: dict[int, float]  # accuracy by seed
    tf32: dict[int, float]
    d_model: int
    epochs: int
    record: str  # the name of the file

    @property
    def difference(self) -> Spread:
        """The accuracy in TF32 less that in fp32, over seeds."""
        return describe([self.tf32[seed] - self.fp32[seed] for seed in self.fp32])

    @property
    def is_equivalent(self) -> bool:
        """Whether the two precisions differ by less than the margin, by two one-sided tests."""
        return is_within(self.difference, MARGIN)

    def __str__(self) -> str:
        found = self.difference
        so = f"{'within' if self.is_equivalent else 'not shown to be within'} the margin of {MARGIN:g}"
        return (
            f"Runs in TF32 instead of fp32 {'are no' if self.is_equivalent else 'are a'} departure: {found.mean:+.3f} "
            f"({found.low:+.3f} to {found.high:+.3f}) over {found.n} paired seeds is {so} (ReBased, T = 256, "
            f"D = {self.d_model}, {self.epochs} epochs; {self.record})."
        )


def load_precision_test(path: Path) -> PrecisionTest:
    """The test in a file that `json.dumps(test._asdict())` wrote."""
    saved = read_json(path)
    for name in ("fp32", "tf32"):
        saved[name] = {int(seed): value for seed, value in saved[name].items()}
    return PrecisionTest(**saved)
