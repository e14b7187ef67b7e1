"""The figures of a page on probes: attention maps, one row of them, similarities, and attention by distance."""

from collections.abc import Sequence
from functools import partial
from math import exp
from typing import Any

from rebased.analysis.attention import UNIT
from rebased.report.drawing import INK, SERIES, Axes, MaxNLocator, Panels, draw_panels, grid, named_looks, powers_of_two
from rebased.report.heatmap import heatmap, scale
from rebased.report.probe.cells import ProbeCell, Record
from rebased.report.probe.tables import best_layer, similarities

TOP = 6.0  # similarities are drawn up to so many times their mean


def attention_maps(cells: Sequence[ProbeCell], example: int, which: str) -> str | None:
    """The matrix of one example, one panel per model, beside the truth: Figures 5 and 8. None if none was kept."""
    known = [cell for cell in cells if len(cell.layer["drawn"]) > example]
    if not known:
        return None
    kept = known[0].layer["drawn"][example]
    truth = [[float(key == target) for key in range(known[0].first["context"])] for target in kept["targets"]]
    drawn = {"Ground truth": heatmap(truth, "Ground truth")}
    for cell in known:
        mine = cell.layer["drawn"][example]
        matrix = [[weight / UNIT for weight in row] for row in mine[which]]
        drawn[str(cell.model)] = heatmap(matrix, f"Attention of {cell.model}", list(enumerate(mine["targets"])))
    columns = 4 if len(drawn) > 3 else len(drawn)
    return (scale() if example == 0 else "") + grid(drawn, columns)


def last_rows(cells: Sequence[ProbeCell]) -> Panels | None:
    """The weights of the last question by position of the key, one panel per model: Figure 9. None if none was kept."""

    def draw(kept: dict[str, Any], axes: Axes) -> None:
        weights, target = [weight / UNIT for weight in kept["best"][-1]], kept["targets"][-1]
        axes.bar(range(len(weights)), weights, color=SERIES[0], width=0.9)
        answer: dict[str, Any] = {"color": SERIES[1], "marker": "o", "ls": "none", "label": "the answer's position"}
        axes.plot([target], [weights[target]], **answer)
        share = 1 / (kept["queries"][-1] + 1)
        axes.axhline(share, color=INK, lw=1, ls=":", label="uniform share")
        axes.set(xlabel="position", ylabel="attention", ylim=(0, max(*weights, 4 * share) * 1.08))

    panels = {str(cell.model): partial(draw, kept) for cell in cells for kept in cell.layer["drawn"][:1]}
    return draw_panels(panels, "row-0", "Attention of the last query") if panels else None


def similarity_panels(cells: Sequence[ProbeCell]) -> Panels | None:
    """Similarity against s = q . k / sqrt(K), over the density of s: Figure 2. None if no mixer has a similarity."""

    def draw(part: dict[str, Any], axes: Axes) -> None:
        xs, ys = fill_density(axes, part["scores"]), [value / part["mean"] for value in part["similarity"]]
        axes.plot(xs, ys, color=SERIES[0], lw=2, label="similarity")
        finish(axes, "s = q · k / √K")

    drawn = {str(cell.model): partial(draw, part) for cell in cells for part in similarities(cell)[:1]}
    return draw_panels(drawn, "similarity", "Similarity by score") if drawn else None


def parabola_panels(cells: Sequence[ProbeCell]) -> Panels | None:
    """The learnt similarity against q . k before gamma and beta, beside exp and Based. None without gamma and beta."""

    def draw(part: dict[str, Any], axes: Axes) -> None:
        xs = fill_density(axes, part["scores"])
        a, b, c = part["parabola"]
        held = [each for each in zip(xs, part["low"], part["high"], strict=True) if each[1] is not None]
        at, lows, highs = map(list, zip(*held, strict=True))
        axes.fill_between(at, lows, highs, color=SERIES[0], alpha=0.2, lw=0)
        axes.plot(xs, [a * x * x + b * x + c for x in xs], color=SERIES[0], lw=2, label="learnt (best parabola)")
        axes.plot(xs, [exp(x) for x in xs], color=SERIES[1], lw=1.5, ls="--", label="exp")
        based = [1 + x + x * x / 2 for x in xs]
        axes.plot(xs, based, color=SERIES[2], lw=1.5, ls="-.", label="Based: 1 + x + x²/2")
        finish(axes, "q · k / √K before γ and β")

    learned = ((cell, part["learned"]) for cell in cells for part in similarities(cell)[:1])
    drawn = {str(cell.model): partial(draw, part) for cell, part in learned if part is not None}
    columns = min(max(len(drawn), 2), 3)
    return draw_panels(drawn, "parabola", "Learnt similarity by product of q and k", columns) if drawn else None


def fill_density(axes: Axes, scores: dict[str, Any]) -> list[float]:
    """Draw the density of scores as an area that fills 0.8 of the panel. Returns the centres of its bins."""
    density, low, high = scores["density"], scores["low"], scores["high"]
    step = (high - low) / len(density)
    xs = [low + (i + 0.5) * step for i in range(len(density))]
    tallest = max(density) or 1.0
    axes.fill_between(xs, [0.8 * TOP * value / tallest for value in density], color=INK, alpha=0.12, lw=0)
    return xs


def finish(axes: Axes, label: str) -> None:
    """Axes of a similarity: in units of its mean, from 0 to TOP."""
    axes.axhline(1.0, color=INK, lw=1, ls=":", label="mean similarity")
    axes.set(xlabel=label, ylabel="similarity / mean", ylim=(0, TOP))


def mass_by_distance(records: Sequence[Record], names: Sequence[str]) -> Panels:
    """Attention of the best head on the token after the previous occurrence, by distance: one line per run."""
    styles = named_looks(names)

    def draw(axes: Axes) -> None:
        for name, record in zip(names, records, strict=True):
            xs, ys = [each["nearest"] for each in record["distances"]], best_layer(record)["by_distance"]
            axes.plot(xs, [each["best"] for each in ys], **styles[name], marker="o", label=name)
        axes.plot(xs, [each["uniform"] for each in record["distances"]], color=INK, lw=1, ls=":", label="uniform")
        axes.set(xlabel="tokens since the previous occurrence", ylabel="attention, best head", ylim=(0, None))
        powers_of_two(axes, xs)

    def by_layer(axes: Axes) -> None:
        for name, record in zip(names, records, strict=True):
            xs = [layer["layer"] for layer in record["layers"]]
            axes.plot(xs, [layer["best"] for layer in record["layers"]], **styles[name], marker="o")
        axes.set(xlabel="layer", ylabel="attention, best head of the layer", ylim=(0, None))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))

    panels = {"by distance, the best head of all": draw}
    if any(len(record["layers"]) > 1 for record in records):
        panels["by layer, over all distances"] = by_layer
    return draw_panels(panels, "mass-by-distance", "Attention on the token after the previous occurrence")
