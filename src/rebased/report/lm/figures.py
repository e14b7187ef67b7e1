"""Figures of language models: AR tokens by distance, and training curves."""

from collections.abc import Sequence
from functools import partial
from math import ceil
from statistics import fmean
from typing import Any

from rebased.report.drawing import (
    INK,
    Axes,
    LogLocator,
    MaxNLocator,
    Panels,
    draw_band,
    draw_line,
    draw_panels,
    named_looks,
    powers_of_two,
)
from rebased.report.lm.models import LanguageModels, curve

PLACES = 48  # of a training curve


def perplexity_by_distance(found: LanguageModels, styles: dict[str, dict[str, Any]], name: str) -> Panels | None:
    """Perplexity of AR tokens by distance, one line per model: the mean over seeds, and a band from worst to best. None
    if no record has it."""

    def draw(axes: Axes) -> None:
        for model, values in found.by_distance.items():
            at, texts = [distance.nearest for distance in values], [f"{model}, {where}" for where in values]
            draw_band(axes, at, list(values.values()), texts, **styles[model], marker="o", label=model)
        axes.set(xlabel="tokens since the bigram was last seen", ylabel="perplexity of AR tokens", yscale="log")
        label_log_axes(axes)
        powers_of_two(axes, [distance.nearest for values in found.by_distance.values() for distance in values])

    title = "Perplexity of AR tokens by distance, mean over seeds"
    return draw_panels({"": draw}, name, title) if found.by_distance else None


def training_curves(found: LanguageModels, styles: dict[str, dict[str, Any]], name: str) -> Panels | None:
    """Training loss (a line) and validation loss (dots) by step, one panel per model; None if no record has them.

    Of one model the lines of all seeds, so that a reader sees where the two part. The panels share their axes.
    """
    known = [curve(run, "step", "loss") for run in found.runs]
    later = [value for at, values in known for step, value in zip(at, values, strict=True) if step > at[-1] / 10]
    if not later:
        return None
    heard = [value for run in found.runs for value in curve(run, "eval", "loss")[1]]
    bottom, top = 0.97 * min([*later, *heard]), 1.03 * max(later)

    def draw(model: str, axes: Axes) -> None:
        dots: dict[str, Any] = {"color": INK, "marker": "o", "ms": 4, "ls": ":", "lw": 1}
        for run in found.models[model].values():
            at, values = smoothed(*curve(run, "step", "loss"))
            axes.plot(at, values, **styles[model] | {"lw": 1.2, "ls": "-"}, label="training")
            at, values = curve(run, "eval", "loss")
            texts = [f"{model}, seed {run.seed}, step {s:,}: {v:.3f}" for s, v in zip(at, values, strict=True)]
            draw_line(axes, at, values, texts, **dots, label="validation")
        axes.set(xlabel="step", ylabel="nats per token", ylim=(bottom, top))
        axes.xaxis.set_major_locator(MaxNLocator(4))

    panels = {model: partial(draw, model) for model in found.models}
    return draw_panels(panels, name, "Training and validation loss by step")


def smoothed(at: Sequence[int], values: Sequence[float]) -> tuple[list[int], list[float]]:
    """At most PLACES means of consecutive values, each at its last step."""
    size = max(1, ceil(len(at) / PLACES))
    ends = range(len(at), 0, -size)
    return [at[end - 1] for end in ends][::-1], [fmean(values[max(0, end - size) : end]) for end in ends][::-1]


def label_log_axes(axes: Axes) -> None:
    """A few labelled ticks per axis, written out without powers of ten, however short the axis is."""
    for axis, (low, high) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
        short = axis.get_scale() == "linear" or high / low < 5
        axis.set_major_locator(MaxNLocator(5) if short else LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(lambda value, _: f"{value:,g}")
    axes.minorticks_off()


def styles_of(groups: Sequence[LanguageModels]) -> dict[str, dict[str, Any]]:
    """One look per model in all figures of a page."""
    return named_looks([name for group in groups for name in group.models])
