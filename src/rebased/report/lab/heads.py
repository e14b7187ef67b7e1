"""With how many heads does it recall what the paper reports? It does not tell; measurements do."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from rebased.report.lab.cells import Cell, Results

HeadsByPlace = Mapping[str, Sequence[tuple[int, Cell]]]
"""For each task and width: cells by their number of heads."""


def cells_by_heads(results: Results) -> HeadsByPlace:
    """Only places where some model was run with several numbers of heads."""
    places: dict[str, list[tuple[int, Cell]]] = {}
    for cell in results.cells:
        heads = heads_of(cell.any_run.settings["model"])
        if heads is not None:
            places.setdefault(f"{cell.task}, D = {cell.d_model}", []).append((heads, cell))
    varied: dict[str, list[tuple[int, Cell]]] = {}
    for where, cells in places.items():
        counts: dict[str, set[int]] = {}
        for heads, cell in cells:
            counts.setdefault(cell.any_run.model, set()).add(heads)
        kept = [(heads, cell) for heads, cell in cells if len(counts[cell.any_run.model]) > 1]
        if kept:
            varied[where] = sorted(kept, key=lambda pair: (pair[1].any_run.model, pair[0]))
    return varied


def heads_of(model: Mapping[str, Any]) -> int | None:
    """Of the last mixer that has any: the one that is compared."""
    counts = [mixer["n_heads"] for mixer in model["mixers"] if "n_heads" in mixer]
    return counts[-1] if counts else None


def distances(places: HeadsByPlace) -> dict[int, float]:
    """By number of heads, how far ours is from the paper on average; only over what was run with every number."""
    numbers = {heads for cells in places.values() for heads, _ in cells}
    apart: dict[int, list[float]] = {heads: [] for heads in sorted(numbers)}
    for cells in places.values():
        for model in {cell.any_run.model for _, cell in cells}:
            known = {heads: cell for heads, cell in cells if cell.any_run.model == model and cell.paper}
            if known.keys() == numbers:
                for heads, cell in known.items():
                    apart[heads].append(abs(cell.test.mean - cell.paper.mean) if cell.paper else 0.0)
    return {heads: fmean(values) for heads, values in apart.items() if values}
