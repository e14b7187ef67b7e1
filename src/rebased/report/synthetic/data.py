"""The data that a page is computed from, as JSON inside the page: 2,000 runs of 64 epochs take about 1.5 MB."""

import json
from collections.abc import Sequence
from typing import Any

from rebased.report.comparisons import as_record
from rebased.report.page import finite
from rebased.report.synthetic.cells import Cell, Results
from rebased.report.synthetic.comparisons import Family
from rebased.runs.finished import Run


def page_data(runs: Sequence[Run], results: Results, families: Sequence[Family]) -> dict[str, Any]:
    """Configs, runs, results and comparisons. Runs refer to their config by its index; lr and seed are in the run."""
    configs: dict[str, int] = {}
    listed = []
    for run in runs:
        shared = run.settings | {"train": {k: v for k, v in run.settings["train"].items() if k not in ("lr", "seed")}}
        number = configs.setdefault(json.dumps(shared, sort_keys=True), len(configs))
        listed.append(
            {
                "digest": run.digest,
                "folder": run.folder,
                "model": run.model,
                "config": number,
                "lr": run.lr,
                "seed": run.seed,
                "status": run.status,
                "code": run.code,
                "device": run.device,
                "parameters": run.parameters,
                "seconds": round(run.seconds, 2),
                "best_epoch": run.best.epoch,
                "test": [round(accuracy, 4) for accuracy in run.accuracies],
                "held_out": run.held_out,
            }
        )
    return {
        "configs": [json.loads(config) for config in configs],
        "runs": listed,
        "results": [
            {
                "task": cell.task,
                "model": str(cell.model),
                "d_model": cell.d_model,
                "lr": cell.choice.lr,
                "test": finite(cell.test._asdict()),
                "held_out": finite(cell.held_out._asdict()) if cell.held_out else None,
                "lr_means": cell.lr_means,
                **reference_entry(cell),
            }
            for cell in results.cells
        ],
        "comparisons": [as_record(contrast) for family in families for contrast in family.contrasts],
    }


def reference_entry(cell: Cell) -> dict[str, Any]:
    """What others report for a cell, by the name of the reference values; empty if there are none at all."""
    value = cell.reference_value
    entry = {key: getattr(value, key) for key in ("mean", "sd", "at_least", "error")} if value else None
    return {cell.known.name: entry} if cell.known.name else {}
