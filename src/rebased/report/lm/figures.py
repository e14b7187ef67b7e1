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

PLACES = 16  # of a training curve that a reader can point at


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
    """Training loss and validation perplexity by step, one line per run; None if no record has such lines."""

    def panel(kind: str, key: str, label: str) -> Draw:
        def draw(axes: Axes) -> None:
            for model, runs in found.models.items():
                for n, run in enumerate(runs.values()):
                    marker = "o" if kind == "eval" else None
                    look = styles[model] | {"lw": 1.2, "ms": 4, "marker": marker, "label": None if n else model}
                    at, values = curve(run, kind, key)
                    axes.plot(at, values, **look)
                    shown = range(len(at) - 1, -1, -max(1, ceil(len(at) / PLACES)))  # from the last step back
                    texts = [f"{model}, seed {run.seed}, step {at[i]:,}: {values[i]:.4g}" for i in shown]
                    hover(axes, [at[i] for i in shown], [values[i] for i in shown], texts)
            axes.set(xlabel="step", ylabel=label, xscale="log" if kind == "step" else "linear", yscale="log")
            label_log_axes(axes)

        return draw

    wanted = {"Training loss": ("step", "loss", "nats per token"), "Validation": ("eval", "perplexity", "perplexity")}
    panels = {
        heading: panel(*what) for heading, what in wanted.items() if any(curve(run, *what[:2])[0] for run in found.runs)
    }
    return draw_panels(panels, name, "Training curves, one line per run") if panels else None


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
