"""The tables of a page on probes."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from rebased.analysis.spread import describe
from rebased.report.probe.cells import ProbeCell, Record
from rebased.report.reference_values import agreement
from rebased.report.tables import NONE, Table, plus_minus


def iou_table(cells: Sequence[ProbeCell]) -> Table:
    """Soft IoU over heads, of the best head and of the mean matrix, accuracy, and reference values with a verdict."""
    head = ("model", "D", "seeds", "IoU", "IoU, live heads", "IoU, best head", "IoU, mean matrix", "accuracy")
    names = [cell.known.name for cell in cells if "iou" in cell.reference.values]
    rows = [
        (
            *(str(cell.model), str(cell.d_model), str(len(cell.records)), plus_minus(cell.spread("iou"))),
            plus_minus(describe(list(cell.live_iou.values()))) if cell.live_iou else NONE,
            *map(plus_minus, (cell.spread("iou", "best"), cell.matrix_iou, cell.accuracy)),
            *(verdict(cell) if names else ()),
        )
        for cell in cells
    ]
    return Table((*head, f"{names[0]}: IoU", f"{names[0]}: accuracy", "IoU agrees") if names else head, rows)


def verdict(cell: ProbeCell) -> tuple[str, str, str]:
    """The reported IoU and accuracy, and whether the IoU agrees with ours."""
    iou, accuracy = cell.reference.values.get("iou"), cell.reference.values.get("probed_accuracy")
    near = agreement(cell.spread("iou"), iou) if iou else NONE
    return f"{iou.mean:.3f}" if iou else NONE, f"{accuracy.mean:.3f}" if accuracy else NONE, near


def look_table(cells: Sequence[ProbeCell]) -> Table:
    """Mass on the answer, entropy and noisy tokens, as means over heads and of the best head."""
    heads = [head for what in ("mass", "entropy", "noisy tokens") for head in (what, f"{what}, best head")]
    rows = [
        (
            str(cell.model),
            str(cell.d_model),
            *(
                plus_minus(cell.spread(name, which), digits)
                for name, digits in (("mass", 3), ("entropy", 2), ("noisy", 1))
                for which in ("mean", "best")
            ),
        )
        for cell in cells
    ]
    return Table(("model", "D", *heads), rows)


def examples_table(cells: Sequence[ProbeCell]) -> Table:
    """The IoU of every run, with intervals over examples."""
    head = ("model", "D", "seed", "lr", "examples", "layer", "IoU", "95 % interval", "best head", "its IoU", "interval")
    rows = [
        (
            *(str(cell.model), str(cell.d_model), str(seed), f"{record['config']['train']['lr']:g}"),
            *(f"{record['examples']:,}", str(layer["layer"]), f"{layer['iou']['mean']:.4f}"),
            *(interval(layer["iou"]["interval"]), str(layer["best_head"]), f"{layer['iou']['best']:.4f}"),
            interval(layer["iou"]["best_interval"]),
        )
        for cell in cells
        for seed, record in cell.records.items()
        for layer in record["layers"]
    ]
    return Table(head, rows)


def similarity_table(cells: Sequence[ProbeCell]) -> Table:
    """How near to zero similarities come, and how often."""
    known = [(cell, parts) for cell in cells if (parts := similarities(cell))]
    shares = list(known[0][1][0]["small"]) if known else []
    head = ("model", "D", "smallest", "of the mean", "1 % below (× uniform)")
    rows = [
        (
            *(str(cell.model), str(cell.d_model), f"{min(part['least'] for part in parts):.2g}"),
            f"{min(part['least'] / part['mean'] for part in parts):.2g}",
            f"{fmean(part['lowest'] for part in parts):.2g}",
            *(f"{fmean(part['small'][share] for part in parts):.1%}" for share in shares),
        )
        for cell, parts in known
    ]
    return Table((*head, *(f"below {share} × uniform" for share in shares)), rows)


def similarities(cell: ProbeCell) -> list[dict[str, Any]]:
    """What was found of the similarities of a cell's last layer, one entry per seed."""
    found = (record["layers"][-1]["similarity"] for record in cell.records.values())
    return [part for part in found if part]


def best_layer(record: Record) -> dict[str, Any]:
    """The layer with the best head of a probe on text."""
    return next(layer for layer in record["layers"] if layer["layer"] == record["best"]["layer"])


def text_table(records: Sequence[Record], names: Sequence[str]) -> Table:
    """One row per layer: the attention on the token after the previous occurrence, at AR tokens."""
    head = ("model", "seed", "layer", "heads", "mean over heads", "best head", "its mass", "95 % interval", "uniform")
    rows = [
        (
            *(name, str(record["config"]["train"]["seed"]), str(layer["layer"]), str(layer["heads"])),
            *(f"{layer['mean']:.4f}", str(layer["best_head"]), f"{layer['best']:.4f}"),
            *(interval(layer["best_interval"]), f"{record['uniform']:.4f}"),
        )
        for name, record in zip(names, records, strict=True)
        for layer in record["layers"]
    ]
    return Table(head, rows)


def interval(ends: Sequence[float | None]) -> str:
    """'0.170 to 0.176'"""
    low, high = ends
    return NONE if low is None or high is None else f"{low:.4f} to {high:.4f}"
