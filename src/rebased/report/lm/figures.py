"""Figures of language models: perplexity by model and seed, AR tokens by distance, and training curves."""

from collections.abc import Sequence
from math import ceil
from statistics import fmean
from typing import Any

from rebased.report.drawing import (
    INK,
    Axes,
    Draw,
    FuncFormatter,
    LogLocator,
    MaxNLocator,
    Panels,
    draw_band,
    draw_panels,
    hover,
    named_looks,
    powers_of_two,
)
from rebased.report.lm.models import PARTS, LanguageModels, curve

PLACES = 48  # of a training curve


def perplexity_by_model(found: LanguageModels, styles: dict[str, dict[str, Any]], name: str) -> Panels:
    """One panel per part of the tokens, one row per model: a dot per seed, and a cross at their mean."""

    def panel(part: str) -> Draw:
        def draw(axes: Axes) -> None:
            for row, model in enumerate(found.models):
                by_seed = found.values(model, part)
                values = list(by_seed.values())
                look = styles[model] | {"ls": "none"}
                axes.plot(values, [-row] * len(values), **look, marker="o", alpha=0.7, label=model)
                axes.plot([sum(values) / len(values)], [-row], color=INK, ls="none", marker="x", ms=8, mew=2)
                texts = [f"{model}, seed {seed}: {value:.3f}" for seed, value in by_seed.items()]
                hover(axes, values, [-row] * len(values), texts)
            axes.plot([], [], color=INK, ls="none", marker="x", ms=8, mew=2, label="mean over seeds")
            axes.set(xlabel="perplexity", ylim=(-len(found.models) + 0.5, 0.5), yticks=[])
            axes.xaxis.set_major_locator(MaxNLocator(4))

        return draw

    panels = {f"{heading} tokens": panel(part) for part, heading in PARTS.items()}
    return draw_panels(panels, name, "Perplexity by model, one dot per seed")


def perplexity_by_distance(found: LanguageModels, styles: dict[str, dict[str, Any]], name: str) -> Panels | None:
    """Perplexity of AR tokens by distance, one line per model: the mean over seeds, and a band from worst to best. None
    if no record has it."""

    def draw(axes: Axes) -> None:
        for model, values in found.by_distance.items():
            at = [distance.nearest for distance in values]
            texts = draw_band(axes, at, list(values.values()), **styles[model], marker="o", label=model)
            texts = [f"{model}, {where}: {text}" for where, text in zip(values, texts, strict=True)]
            hover(axes, at, [fmean(seeds) for seeds in values.values()], texts)
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

    def panel(model: str) -> Draw:
        def draw(axes: Axes) -> None:
            for n, run in enumerate(found.models[model].values()):
                at, values = smoothed(*curve(run, "step", "loss"))
                axes.plot(at, values, **styles[model] | {"lw": 1.2, "ls": "-"}, label=None if n else "training")
                at, values = curve(run, "eval", "loss")
                dots: dict[str, Any] = {"color": INK, "marker": "o", "ms": 4, "ls": ":", "lw": 1}
                axes.plot(at, values, **dots, label=None if n else "validation")
                texts = [f"{model}, seed {run.seed}, step {s:,}: {v:.3f}" for s, v in zip(at, values, strict=True)]
                hover(axes, at, values, texts)
            axes.set(xlabel="step", ylabel="nats per token", ylim=(bottom, top))
            axes.xaxis.set_major_locator(MaxNLocator(4))

        return draw

    return draw_panels({model: panel(model) for model in found.models}, name, "Training and validation loss by step")


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
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.minorticks_off()


def styles_of(groups: Sequence[LanguageModels]) -> dict[str, dict[str, Any]]:
    """One look per model in all figures of a page."""
    return named_looks([name for group in groups for name in group.models])
