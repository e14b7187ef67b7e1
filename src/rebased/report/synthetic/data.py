"""What a page was computed from, small enough to be inside it: 2,000 runs of 64 epochs take some 1.5 MB."""

import json
from collections.abc import Sequence
from math import isfinite
from typing import Any

from rebased.report.synthetic.cells import Results
from rebased.report.synthetic.comparisons import Family
from rebased.runs.finished import Run


def page_data(runs: Sequence[Run], results: Results, families: Sequence[Family]) -> dict[str, Any]:
    """Configs stand once each, less lr and seed, which each run has; with its test accuracy epoch by epoch."""
    configs: dict[str, int] = {}
    told = []
    for run in runs:
        shared = run.settings | {"train": {k: v for k, v in run.settings["train"].items() if k not in ("lr", "seed")}}
        number = configs.setdefault(json.dumps(shared, sort_keys=True), len(configs))
        told.append(
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
        "runs": told,
        "results": [
            {
                "task": cell.task,
                "model": str(cell.model),
                "d_model": cell.d_model,
                "lr": cell.choice.lr,
                "test": finite(cell.test._asdict()),
                "held_out": finite(cell.held_out._asdict()) if cell.held_out else None,
                "lr_means": cell.lr_means,
                "paper": cell.paper._asdict() if cell.paper else None,
            }
            for cell in results.cells
        ],
        "comparisons": [
            finite({**contrast._asdict(), **contrast.found._asdict(), **contrast.found.difference._asdict()})
            for family in families
            for contrast in family.contrasts
        ],
    }


def finite(values: dict[str, Any]) -> dict[str, Any]:
    """JSON has neither nan nor infinity; what stands for several values is spread out beside it, and left out."""
    leaves = {key: value for key, value in values.items() if key not in ("found", "difference")}
    return {key: None if isinstance(value, float) and not isfinite(value) else value for key, value in leaves.items()}
