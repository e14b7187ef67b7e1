"""Plans: a question, its tests and their margins, committed before the runs.

A plan is a Markdown file with one block of YAML, beside the sweep that makes its runs (results/NAME/plan.md; a second
plan of the same folder has another name).
"""

import re
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import Field, model_validator

from rebased.config import Config


class PlannedTest(Config):
    """One comparison: the runs of two groups, the number that each run counts with, the test, and the margin."""

    name: str
    value: Literal[
        "held_out",
        "began",
        "loss.all",
        "loss.ar",
        "loss.non_ar",
        "loss_change",  # of all tokens, since the run that `less` describes
        "gap_growth",  # of overfitting since the first pass
        "iou.live",
        "iou.mean",
        "iou.best",
    ]
    a: dict[str, Any]  # `model` is the name of a model, or a list of names; other keys are paths of settings
    b: dict[str, Any] = Field(default_factory=dict)
    level: float | None = None  # instead of b: a value that others report
    runs: int | tuple[int, int]  # of a and of b
    test: Literal["welch", "permutation", "fisher"] = "welch"
    strata: str | None = None  # the path of a setting: labels are permuted, and differences taken, within its values
    less: dict[str, Any] | None = None  # settings of the run of the same model and seed whose loss is subtracted
    margin: float | None = None  # a difference below it does not matter; Fisher's test has none
    note: str = ""  # what the reader must be told beside the answer

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if "model" not in self.a or ("model" in self.b) == (self.level is not None):
            raise ValueError(f"test {self.name!r}: a needs `model`, and b needs it too or there is a `level`")
        if self.level is not None and self.test != "welch":
            raise ValueError(f"test {self.name!r}: a level has no runs to exchange; use test: welch")
        if (self.value == "loss_change") != (self.less is not None):
            raise ValueError(f"test {self.name!r}: value: loss_change and `less` belong together")
        if self.claims_no_loss and (self.margin is None or self.test == "fisher"):
            raise ValueError(f"test {self.name!r} needs a margin, and a test of means")
        return self

    @property
    def claims_no_loss(self) -> bool:
        """Whether the claim is not that a is ahead of b, but that it is not behind by the margin."""
        return self.name.endswith("loses nothing")

    @property
    def wanted(self) -> tuple[int, int]:
        """How many runs a and b need."""
        a, b = (self.runs, self.runs) if isinstance(self.runs, int) else self.runs
        return a, b if self.level is None else 0


class Plan(Config):
    """What a sweep is to decide."""

    correct: Literal["none", "holm"]  # over `tests`
    tests: tuple[PlannedTest, ...]
    shown: tuple[PlannedTest, ...] = ()  # computed in the same way, and decides nothing
    known: dict[str, Any] | None = None  # settings of those of its runs that were finished before it


def read_plan(path: Path) -> Plan:
    """The plan in a Markdown file. ValueError if it has no block of YAML, or one that is no plan."""
    block = re.search(r"^```yaml\n(.*?)^```", path.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    if block is None:
        raise ValueError(f"{path} has no block of YAML; a plan states its tests in one")
    return Plan.model_validate(yaml.safe_load(block[1]))


def plans_in(folder: Path) -> dict[str, Path]:
    """Plans of the folders in a folder: {"mini-pile": its plan.md, "mini-pile/kernels": kernels.md beside it}"""
    paths = sorted(folder.glob("*/*.md"), key=lambda path: (path.parent.name, path.name != "plan.md", path.name))
    return {path.parent.name + ("" if path.name == "plan.md" else f"/{path.stem}"): path for path in paths}
