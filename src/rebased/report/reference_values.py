"""Reference values: what a paper, or anybody else, reports for the models of runs. A report shows them beside ours.

`ReferenceValues` is the one way in. Its function `of` gets a run and returns what is known about it:

    def of(run: Run) -> Reference:
        known = {"ReBased": 0.59, "Based": 0.45}
        return Reference({"accuracy": ReferenceValue(known[run.model])}) if run.model in known else Reference()

    Report(collect([Path("runs")]), values=ReferenceValues("survey", of))

`read_reference_values` makes one from a YAML or JSON file, which `rebased report --reference-values FILE` takes:

    name: survey                        # the heading of the column; sentences say "The survey has a value ..."
    source: its Table 2, as printed
    entries:
      - model: ReBased                  # as a report names it, without settings in parentheses
        task: T = 256, 32 pairs         # as a report names it; left out: any task or text
        d_model: 24                     # left out: any width
        values: {accuracy: {mean: 0.59, sd: 0.06, error: 0.005, seeds: 5}}
      - model: ReBased
        values: {all: 16.45, ar: 3.67, non_ar: 56.31}    # perplexity; a number alone is a mean

The measures are those of `Measure`. If several entries fit a run, the last one with a measure counts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isnan
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from rebased.analysis.spread import Spread
from rebased.analysis.unpaired import Effect, effect_of
from rebased.config import Config, load_config
from rebased.runs.finished import Run
from rebased.runs.lm_config import LMRunConfig
from rebased.runs.run_names import task_names

Measure = Literal["accuracy", "all", "ar", "non_ar", "iou", "probed_accuracy", "gamma", "beta"]
"""What a value is of: test accuracy on a synthetic task; perplexity of all, AR and non-AR tokens; soft IoU of attention
and answers, and accuracy on the probed examples; the means of gamma and beta after training."""

MARGIN = 0.1
"""Of accuracies and other means between 0 and 1: the smallest difference that matters."""
Agreement = Literal["agrees", "differs", "too wide to tell"]


Finite = Annotated[float, Field(ge=-1e9, le=1e9, allow_inf_nan=False)]
Positive = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]  # or zero
Text = Annotated[str, Field(max_length=200)]


class ReferenceValue(NamedTuple):
    """A mean over seeds that somebody reports."""

    mean: Finite
    sd: Positive | None = None  # sample standard deviation over seeds; None if it is not reported
    at_least: bool = False  # the mean is a lower bound
    error: Positive = 0.0  # of reading or rounding the value: half a unit of its last digit
    seeds: Annotated[int, Field(ge=1)] = 1  # that the mean is over
    margin: Positive = MARGIN  # a difference below it does not matter

    def __str__(self) -> str:
        return f"{'≥ ' if self.at_least else ''}{self.mean:.2f}" + (f" ± {self.sd:.2f}" if self.sd is not None else "")


class Reference(NamedTuple):
    """What is known about one run elsewhere. All of it may be empty."""

    values: Mapping[Measure, ReferenceValue] = {}
    source: str = ""  # where the values are from, in words; of a language model a sentence for a note below the table
    differences: Sequence[str] = ()  # settings in which the run differs from the one that the values are of
    limit: str = ""  # why the value can be compared less well than others, such as "of another tokenizer"
    remark: str = ""  # a sentence for readers of the values, whether or not there are some


@dataclass(frozen=True)
class ReferenceValues:
    """Values that reports show beside those of runs. `name` is the heading of their columns, such as "paper"."""

    name: str = ""  # empty if there are none
    of: Callable[[Run], Reference] = field(default_factory=lambda: lambda run: Reference())


NO_VALUES = ReferenceValues()


def agreement(ours: Spread, theirs: ReferenceValue) -> Agreement:
    """Whether two means are equal for practical purposes, by two one-sided tests with the value's margin.

    They agree if the 90 % interval of their difference, widened by the error of reading the value, lies within the
    margin. They differ if the 95 % interval, widened alike, excludes 0. Otherwise the interval is too wide to tell.
    """
    if ours.n < 2:
        return "too wide to tell"
    found = difference_from(ours, theirs)
    (low, high), (least, most) = found.interval(0.9), found.interval()
    if theirs.at_least:
        return "agrees" if low >= -theirs.error else "differs" if high < -theirs.error else "too wide to tell"
    if max(-low, high) + theirs.error < theirs.margin:
        return "agrees"
    return "differs" if least > theirs.error or most < -theirs.error else "too wide to tell"


def difference_from(ours: Spread, theirs: ReferenceValue) -> Effect:
    """Our mean less the reference value. Where that has no spread, ours stands for both; a bound has none."""
    sd = 0.0 if isnan(ours.sd) else ours.sd
    their_sd = 0.0 if theirs.at_least else sd if theirs.sd is None else theirs.sd
    return effect_of(ours.mean, sd, ours.n, theirs.mean, their_sd, theirs.seeds)


class EntryConfig(Config):
    """The values of a model, on one task and at one width if these are given."""

    model: Text
    task: Text | None = None
    d_model: Annotated[int, Field(ge=1)] | None = None
    values: dict[Measure, Finite | ReferenceValue]

    def fits(self, run: Run) -> bool:
        """Whether the values are of this run's model."""
        same_task = self.task is None or [self.task] == task_names([run.settings])
        return run.model == self.model and same_task and self.d_model in (None, run.d_model)


class FileConfig(Config):
    """A file of reference values."""

    name: Annotated[str, Field(min_length=1, max_length=40)]
    source: Text = ""
    entries: Annotated[tuple[EntryConfig, ...], Field(min_length=1, max_length=10_000)]


def read_reference_values(path: Path, runs: Sequence[Run]) -> ReferenceValues:
    """The values in a YAML or JSON file, as the module's docstring describes it. ValueError if none is of `runs`."""
    file = load_config(FileConfig, path)

    def of(run: Run) -> Reference:
        values: dict[Measure, ReferenceValue] = {}
        for entry in (entry for entry in file.entries if entry.fits(run)):
            for measure, value in entry.values.items():
                values[measure] = value if isinstance(value, ReferenceValue) else ReferenceValue(value)
        sentence = run.kind is LMRunConfig and file.source
        return Reference(values, f"The {file.name}'s values are from {file.source}." if sentence else file.source)

    if not any(of(run).values for run in runs):
        named, ours = ({each.model for each in some} for some in (file.entries, runs))
        raise ValueError(
            f"{path} has no value for any of these runs. Its models: {', '.join(sorted(named))}; those of the runs: "
            f"{', '.join(sorted(ours))}. If they are the same, tasks or widths differ"
        )
    return ReferenceValues(file.name, of)
