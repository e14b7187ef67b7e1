"""The cells of models that were run with several numbers of heads: papers often do not state it."""

from collections.abc import Mapping, Sequence
from typing import Any

from rebased.config import grouped
from rebased.report.synthetic.cells import Cell, Results, order_of

HeadsByPlace = Mapping[str, Sequence[tuple[int, Cell]]]
"""By task and width: pairs of a number of heads and a cell."""


def cells_by_heads(results: Results) -> HeadsByPlace:
    """The cells of each task and width at which some model was run with several numbers of heads."""
    pairs = [(heads, cell) for cell in results.cells if (heads := heads_of(cell.any_run.settings["model"]))]
    by_model = grouped(pairs, lambda pair: (pair[1].task, pair[1].d_model, pair[1].model.kind))
    varied = [pair for alike in by_model.values() if len({heads for heads, _ in alike}) > 1 for pair in alike]
    varied.sort(key=lambda pair: (order_of(pair[1].model)[0], pair[1].model.kind, pair[0]))
    order = {f"{cell.task}, D = {cell.d_model}": None for _, cell in pairs}
    places = grouped(varied, lambda pair: f"{pair[1].task}, D = {pair[1].d_model}")
    return {where: places[where] for where in order if where in places}


def heads_of(model: Mapping[str, Any]) -> int | None:
    """The number of heads of the last mixer that has heads: the compared one. None without such a mixer."""
    counts = [mixer["n_heads"] for mixer in model["mixers"] if "n_heads" in mixer]
    return counts[-1] if counts else None
