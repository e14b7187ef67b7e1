"""Gamma and beta of queries and keys along training, by length of the sequences: the paper's Figure 10."""

from collections.abc import Mapping, Sequence
from math import nan, prod
from statistics import fmean
from typing import Any

from rebased.report.drawing import INK, Axes, Draw, MaxNLocator, Panels, draw_panels, looks
from rebased.report.paper.values import FIGURE_10
from rebased.report.synthetic.cells import Cell, Results
from rebased.runs.finished import Run
from rebased.runs.synthetic_config import cosine_lr

NAMES = {"q.gamma": "γ of q", "k.gamma": "γ of k", "q.beta": "β of q", "k.beta": "β of k"}
NAMES |= {"qk.gamma": "γ of q and k", "qk.beta": "β of q and k"}
CAPTION = (
    "Mean over features and seeds at the chosen learning rate; the band is one standard deviation over features. The "
    "dotted line is the value that the paper names: γ about 0.13 and β 0. The fine lines of dots, in the "
    "colours of the others, are what weight decay alone leaves of γ."
)
BEFORE = {"gamma": 1.0, "beta": 0.0}  # before the first step


def cells_with_norms(results: Results) -> dict[str, list[Cell]]:
    """The cells whose records hold gamma and beta, by model and width."""
    groups: dict[str, list[Cell]] = {}
    for cell in results.cells:
        if any(run.epochs and "norms" in run.epochs[-1] for run in cell.chosen.values()):
            groups.setdefault(f"{cell.model}, D = {cell.d_model}", []).append(cell)
    return groups


def norm_curves(cells: Sequence[Cell], name: str) -> Panels:
    """One panel per parameter, one line per task. `name` is a prefix for ids, unique on the page."""
    drawn, runs = {cell.task: curves(cell) for cell in cells}, {cell.task: cell.any_run for cell in cells}
    keys = dict.fromkeys(key for found in drawn.values() for key in found)

    def panel(key: str) -> Draw:
        def draw(axes: Axes) -> None:
            for look, (task, found) in zip(looks(), drawn.items(), strict=False):
                if key in found:
                    epochs, means, sds = found[key]
                    axes.plot(epochs, means, **look, label=task)
                    low, high = ([m + sign * sd for m, sd in zip(means, sds, strict=True)] for sign in (-1, 1))
                    axes.fill_between(epochs, low, high, color=look["color"], alpha=0.12, lw=0)
                    alone = [decayed(runs[task], epoch) for epoch in epochs] if key.endswith("gamma") else []
                    axes.plot(epochs[: len(alone)], alone, color=look["color"], lw=1.5, ls=(0, (1, 2)))
            axes.axhline(FIGURE_10[key.split(".")[1]].mean, color=INK, lw=1, ls=":", label="the paper's value")
            axes.set(xlabel="epoch", ylabel=NAMES.get(key, key))
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))

        return draw

    panels = {NAMES.get(key, key): panel(key) for key in keys}
    return draw_panels(panels, name, "Gamma and beta along training", columns=2)


def curves(cell: Cell) -> dict[str, tuple[list[int], list[float], list[float]]]:
    """By parameter of the last layer that has some: epochs, means and standard deviations, over the chosen runs.

    Runs stop when they have solved the task: an epoch counts as long as one run had it.
    """
    by_key: dict[str, dict[int, list[dict[str, Any]]]] = {}
    for run in cell.chosen.values():
        for line in run.epochs:
            for key, entry in last_layer(line).items():
                if key in NAMES and entry["mean"] is not None and entry["sd"] is not None:
                    by_key.setdefault(key, {}).setdefault(line["epoch"], []).append(entry)
    found = {}
    for key, epochs in by_key.items():
        means = [fmean(entry["mean"] for entry in entries) for entries in epochs.values()]
        sds = [fmean(entry["sd"] for entry in entries) for entries in epochs.values()]
        found[key] = ([0, *epochs], [BEFORE[key.split(".")[1]], *means], [0.0, *sds])
    return found


def last_layer(line: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """By parameter, what the line of an epoch says of the last layer that has gamma and beta; empty if none has."""
    layers = line.get("norms") or {}
    return layers[max(layers, key=int)] if layers else {}


def decayed(run: Run, epoch: int) -> float:
    """What weight decay alone would leave of gamma after this many epochs; nan if the record does not tell."""
    train, line = run.settings["train"], run.epochs[-1]
    try:
        left = decay_alone(train["lr"], train["weight_decay"], line["step"] / line["epoch"], train["epochs"], epoch)
    except (KeyError, TypeError, ArithmeticError):  # a stranger's numbers may be too large
        return nan
    return nan if isinstance(left, complex) else left  # complex where lr times decay is above 1


def decay_alone(lr: float, weight_decay: float, steps: float, epochs: int, epoch: int) -> float:
    """What AdamW's weight decay alone leaves of a parameter that began at 1, after `epoch` of so many epochs of so many
    steps."""
    return prod((1 - cosine_lr(lr, before, epochs) * weight_decay) ** steps for before in range(epoch))


def _has_histogram(entry: Mapping[str, Any]) -> bool:
    """Whether a histogram was recorded: not in compact records, and not of numbers that are not finite."""
    return bool(entry.get("counts")) and None not in (entry.get("low"), entry.get("high"))


def final_histograms(cells: Sequence[Cell], name: str) -> Panels | None:
    """The histogram of each parameter after the last epoch, of the first seed: one panel per parameter. None if no
    histogram was recorded."""
    layers = {cell.task: found for cell in cells if (found := last_layer(cell.any_run.epochs[-1]))}
    layers = {task: {key: entry for key, entry in e.items() if _has_histogram(entry)} for task, e in layers.items()}
    keys = dict.fromkeys(key for entries in layers.values() for key in entries)

    def panel(key: str) -> Draw:
        def draw(axes: Axes) -> None:
            for look, (task, entries) in zip(looks(), layers.items(), strict=False):
                if key in entries:
                    entry = entries[key]
                    step = (entry["high"] - entry["low"]) / len(entry["counts"])
                    edges = [entry["low"] + i * step for i in range(len(entry["counts"]) + 1)]
                    axes.stairs(entry["counts"], edges, color=look["color"], lw=1.5)
                    axes.plot([], [], **look, label=task)
            axes.set(xlabel=NAMES.get(key, key), ylabel="features")

        return draw

    panels = {NAMES.get(key, key): panel(key) for key in keys}
    if not panels:
        return None
    return draw_panels(panels, name, "Histograms of gamma and beta after training", columns=2)
