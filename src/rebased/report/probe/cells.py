"""Records of probes, grouped: one cell per task, model and width, with a record per seed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any

from rebased.analysis.spread import Spread, describe
from rebased.report.reference_values import NO_VALUES, Reference, ReferenceValues
from rebased.report.synthetic.cells import order_of
from rebased.runs.finished import Run
from rebased.runs.run_names import ModelName, model_names, task_names

Record = dict[str, Any]
LIVE = 0.05  # the IoU above which a head looks at the answers at all


@dataclass(frozen=True)
class ProbeCell:
    """The probes of one model, task and width, by seed."""

    task: str
    model: ModelName
    d_model: int
    records: Mapping[int, Record]
    known: ReferenceValues = NO_VALUES

    @property
    def first(self) -> Record:
        """The record of the first seed."""
        return next(iter(self.records.values()))

    @property
    def layer(self) -> dict[str, Any]:
        """The last layer with a matrix, of the first seed."""
        return self.first["layers"][-1]

    def values(self, name: str, which: str = "mean") -> dict[int, float]:
        """A measure of the last layer with a matrix, by seed: its mean over heads, or the best head's."""
        return {seed: record["layers"][-1][name][which] for seed, record in self.records.items()}

    def spread(self, name: str, which: str = "mean") -> Spread:
        """A measure over seeds."""
        return describe(list(self.values(name, which).values()))

    @cached_property
    def live_iou(self) -> dict[int, float]:
        """The mean IoU over live heads, by seed; without seeds that have none."""
        found = {seed: live_mean(record["layers"][-1]["iou"]["by_head"]) for seed, record in self.records.items()}
        return {seed: value for seed, value in found.items() if value is not None}

    @cached_property
    def matrix_iou(self) -> Spread:
        """The soft IoU of the heads' mean matrix, over seeds."""
        return describe([record["layers"][-1]["matrix_iou"] for record in self.records.values()])

    @cached_property
    def accuracy(self) -> Spread:
        """The accuracy on the examples that were looked at, over seeds."""
        return describe([record["accuracy"] for record in self.records.values()])

    @cached_property
    def reference(self) -> Reference:
        """What others report for this cell."""
        return self.known.of(run_of(self.first))

    @property
    def name(self) -> str:
        """'ReBased, D = 64'"""
        return f"{self.model}, D = {self.d_model}"


def live_mean(by_head: Sequence[float]) -> float | None:
    """The mean over the heads that look at the answers at all; None if there is none."""
    live = [value for value in by_head if value > LIVE]
    return fmean(live) if live else None


def run_of(record: Record) -> Run:
    """The run that a probe is of."""
    return Run(record["folder"], [{**record, "type": "run"}])


def group_probes(records: Sequence[Record], known: ReferenceValues = NO_VALUES) -> list[ProbeCell]:
    """Cells of probes on synthetic tasks: narrow models first; of a width attention first, then in the usual order."""
    settings = [record["config"] for record in records]
    tasks = task_names(settings)
    models = model_names(settings, tasks)
    groups: dict[tuple[str, ModelName, int], dict[int, Record]] = {}
    for record, task, model in zip(records, tasks, models, strict=True):
        config = record["config"]
        groups.setdefault((task, model, config["model"]["d_model"]), {}).setdefault(config["train"]["seed"], record)
    cells = [ProbeCell(*key, dict(sorted(found.items())), known) for key, found in groups.items()]
    return sorted(
        cells, key=lambda cell: (cell.task, cell.d_model, "ttention" not in cell.model.kind, order_of(cell.model))
    )
