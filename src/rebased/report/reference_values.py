"""Reference values: what a paper, or anybody else, reports for the models of runs. A report shows them beside ours.

`ReferenceValues` is the one way in. Its function `of` gets a run and returns what is known about it:

    def of(run: Run) -> Reference:
        known = {"ReBased": 0.59, "Based": 0.45}
        return Reference({"accuracy": ReferenceValue(known[run.model])}) if run.model in known else Reference()

    Report(collect([Path("runs")]), values=ReferenceValues("my paper", of))
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isnan, sqrt
from typing import Literal, NamedTuple

from rebased.analysis import Spread
from rebased.runs.finished import Run

Measure = Literal["accuracy", "all", "ar", "non_ar", "iou", "probed accuracy", "gamma", "beta"]
"""What a value is of: test accuracy on a synthetic task; perplexity of all, AR and non-AR tokens; soft IoU of attention
and answers, and accuracy on the probed examples; the means of gamma and beta after training."""


class ReferenceValue(NamedTuple):
    """A mean over seeds that somebody reports."""

    mean: float
    sd: float | None = None  # sample standard deviation over seeds; None if it is not reported
    at_least: bool = False  # the mean is a lower bound
    error: float = 0.0  # of reading or rounding the value: half a unit of its last digit
    seeds: int = 1  # that the mean is over

    def __str__(self) -> str:
        return f"{'≥ ' if self.at_least else ''}{self.mean:.2f}" + (f" ± {self.sd:.2f}" if self.sd is not None else "")


class Reference(NamedTuple):
    """What is known about one run elsewhere. All of it may be empty."""

    values: Mapping[Measure, ReferenceValue] = {}
    source: str = ""  # where the values are from: words in a sentence, or a note below a table
    differences: Sequence[str] = ()  # settings in which the run differs from the one that the values are of
    limit: str = ""  # why the value can be compared less well than others, such as "of another tokenizer"
    remark: str = ""  # a sentence for readers of the values, whether or not there are some


@dataclass(frozen=True)
class ReferenceValues:
    """Values that reports show beside those of runs. `name` is the heading of their columns, such as "paper"."""

    name: str = ""  # empty if there are none
    of: Callable[[Run], Reference] = lambda run: Reference()


NO_VALUES = ReferenceValues()


def agrees(ours: Spread, theirs: ReferenceValue) -> bool:
    """Whether the means differ by at most two standard errors plus the error of reading the reference value. If one of
    the two has no spread, that of the other is taken for both."""
    if theirs.at_least:
        return ours.mean >= theirs.mean - theirs.error
    sd = (theirs.sd or 0.0) if isnan(ours.sd) else ours.sd
    error = sqrt(sd**2 / ours.n + (sd if theirs.sd is None else theirs.sd) ** 2 / theirs.seeds)
    return abs(ours.mean - theirs.mean) <= 2 * error + theirs.error
