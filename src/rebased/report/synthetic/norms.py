"""Gamma and beta of queries and keys along training, by length of the sequences."""

from collections.abc import Mapping, Sequence
from functools import partial
from math import ceil, nan, prod
from typing import Any, NamedTuple

from rebased.config import grouped
from rebased.report.drawing import INK, Axes, MaxNLocator, Panels, draw_panels, look_of, thinned
from rebased.report.reference_values import Measure
from rebased.report.synthetic.cells import Cell, Results
from rebased.runs.finished import Run
from rebased.runs.schedule import epoch_lr

NAMES = {"q.gamma": "γ of q", "k.gamma": "γ of k", "q.beta": "β of q", "k.beta": "β of k"}
NAMES |= {"qk.gamma": "γ of q and k", "qk.beta": "β of q and k"}
CAPTION = (
    "One line per seed at the chosen learning rate: the mean over features, as long as the run lasts; the band is one "
    "standard deviation over features. {}The fine lines of dots, in the colours of the others, are what weight decay "
    "alone leaves of γ."
)
POINTS = 24  # of a line
BEFORE = {"gamma": 1.0, "beta": 0.0}  # before the first step


def cells_with_norms(results: Results) -> dict[str, list[Cell]]:
    """The cells whose records hold gamma and beta, by model and width."""
    having = (
        cell for cell in results.cells if any(run.epochs and "norms" in run.epochs[-1] for run in cell.chosen.values())
    )
    return grouped(having, lambda cell: f"{cell.model}, D = {cell.d_model}")


def caption(cells: Sequence[Cell]) -> str:
    """The caption of `norm_curves`, with the reference values if there are some."""
    name, values = cells[0].known.name, cells[0].reference.values
    if "gamma" not in values or "beta" not in values:
        return CAPTION.format("")
    named = f"γ about {values['gamma'].mean:g} and β {values['beta'].mean:g}"
    return CAPTION.format(f"The dotted line is the value that the {name} names: {named}. ")


class Curve(NamedTuple):
    """A parameter along one training."""

    run: Run
    epochs: list[int]
    means: list[float]  # over features
    sds: list[float]


def norm_curves(cells: Sequence[Cell], name: str) -> Panels:
    """One panel per parameter, lines of one look per task. `name` is a prefix for ids, unique on the page."""
    drawn = {cell.task: curves(cell) for cell in cells}
    keys = dict.fromkeys(key for found in drawn.values() for key in found)

    def draw(key: str, axes: Axes) -> None:
        for i, (task, found) in enumerate(drawn.items()):
            if key in found:
                draw_curves(axes, found[key], look_of(i), task, decays=key.endswith("gamma"))
        measure: Measure = "gamma" if key.endswith("gamma") else "beta"
        if value := cells[0].reference.values.get(measure):
            axes.axhline(value.mean, color=INK, lw=1, ls=":", label=f"the {cells[0].known.name}'s value")
        axes.set(xlabel="epoch", ylabel=NAMES[key])
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))

    panels = {NAMES[key]: partial(draw, key) for key in keys}
    return draw_panels(panels, name, "Gamma and beta along training", columns=2)


def draw_curves(axes: Axes, found: Sequence[Curve], look: Mapping[str, Any], task: str, decays: bool) -> None:
    """The lines of one task, and what weight decay alone leaves in the longest run if the parameter `decays`."""
    for curve in found:
        kept = thinned(len(curve.epochs), POINTS)
        epochs, means, sds = ([values[i] for i in kept] for values in curve[1:])
        axes.plot(epochs, means, **{**look, "lw": 1.5}, label=task)
        low, high = ([mean + sign * sd for mean, sd in zip(means, sds, strict=True)] for sign in (-1, 1))
        axes.fill_between(epochs, low, high, color=look["color"], alpha=0.12 / len(found), lw=0)
    if decays:
        longest = max(found, key=lambda curve: curve.epochs[-1])
        at = longest.epochs[:: ceil(len(longest.epochs) / POINTS)]
        axes.plot(at, [decayed(longest.run, epoch) for epoch in at], color=look["color"], lw=1.5, ls=(0, (1, 2)))


def curves(cell: Cell) -> dict[str, list[Curve]]:
    """By parameter of the last layer that has some: one curve for each chosen run, from before its first step."""
    found: dict[str, list[Curve]] = {}
    for run in cell.chosen.values():
        entries = [(line["epoch"], key, entry) for line in run.epochs for key, entry in last_layer(line).items()]
        for key in dict.fromkeys(key for _, key, _ in entries if key in NAMES):
            own = [(epoch, entry["mean"], entry["sd"]) for epoch, name, entry in entries if name == key]
            points = [(0, BEFORE[key.split(".")[1]], 0.0), *(point for point in own if None not in point)]
            if len(points) > 1:
                found.setdefault(key, []).append(Curve(run, *map(list, zip(*points, strict=True))))
    return found


def last_layer(line: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Statistics of gamma and beta in the last layer that has them, by parameter; empty if none."""
    layers = line.get("norms") or {}
    return layers[max(layers, key=int)] if layers else {}


def decayed(run: Run, epoch: int) -> float:
    """What weight decay alone would leave of gamma after this many epochs; nan if the record does not tell."""
    train, line = run.settings["train"], run.epochs[-1]
    try:
        lr, decay, steps, epochs = train["lr"], train["weight_decay"], line["step"] / line["epoch"], train["epochs"]
        left = prod((1 - epoch_lr(lr, before, epochs) * decay) ** steps for before in range(epoch))
    except (KeyError, TypeError, ArithmeticError):  # a stranger's numbers may be too large
        return nan
    return nan if isinstance(left, complex) else left  # complex where lr times decay is above 1
