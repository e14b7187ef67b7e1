"""The paper's own figures, drawn again from its values: what ours are held against, also where nothing was run."""

from collections.abc import Mapping, Sequence
from math import exp

from rebased.paper.values import Place
from rebased.report.drawing import SERIES, Axes, Draw, draw_panels, named_looks, powers_of_two
from rebased.report.page import details, figure
from rebased.report.reference_values import ReferenceValue
from rebased.report.synthetic.figures import ACCURACY, dodge

SPAN = (-4.0, 2.5)  # of the scores at which similarities are drawn
STEPS = 131


def papers_accuracy(readings: Mapping[Place, ReferenceValue], key: str, *, hidden: bool = True) -> str:
    """The paper's accuracies by width, one panel per length; `hidden` until the reader opens them."""
    models = list(dict.fromkeys(place.model for place in readings))
    styles = named_looks(models)

    def panel(seq_len: int) -> Draw:
        here = {place: reading for place, reading in readings.items() if place.seq_len == seq_len}

        def draw(axes: Axes) -> None:
            aside = dodge([place.d_model for place in here], models)
            for model in models:
                line = [(place.d_model * aside[model], one) for place, one in here.items() if place.model == model]
                if line:
                    xs, means = [x for x, _ in line], [one.mean for _, one in line]
                    axes.plot(xs, means, **styles[model], marker="x", label=model)
                    bars = {"ecolor": styles[model]["color"], "capsize": 2, "elinewidth": 1}
                    axes.errorbar(xs, means, [one.sd or 0.0 for _, one in line], fmt="none", **bars)
            powers_of_two(axes, [place.d_model for place in here])
            axes.set(xlabel="width D", ylabel="test accuracy", ylim=ACCURACY)

        return draw

    lengths = sorted({place.seq_len for place in readings})
    drawn = {f"T = {seq_len:,}": panel(seq_len) for seq_len in lengths}
    caption = (
        "The paper's values, drawn again: means, and its standard deviations where they could be read. Lines join the "
        "values that were read; ≥ 0.97 is drawn at 0.97."
    )
    panels = draw_panels(drawn, f"{key}-paper", "The paper's test accuracy by model width")
    drawing = figure(panels, caption)
    return details("Show the paper's own values as a figure", drawing) if hidden else drawing


def similarity_functions() -> str:
    """exp, Based's similarity and a square against the score: the functions of the paper's Figure 2."""
    low, high = SPAN
    xs = [low + i * (high - low) / (STEPS - 1) for i in range(STEPS)]

    def lines(axes: Axes) -> None:
        for label, ys, colour, dash in functions(xs):
            axes.plot(xs, ys, color=colour, lw=2, ls=dash, label=label)
        axes.axhline(0.5, color=SERIES[5], lw=1, ls=":", label="0.5, the least of Based")
        axes.set(xlabel="s = q · k / √K", ylabel="similarity", ylim=(0, 5))

    caption = (
        "The functions themselves, which need no record: 1 + s + s²/2 has its minimum of 0.5 at s = -1, and s² comes "
        "to zero. What γ and β make of it in a trained model needs a probe."
    )
    return figure(draw_panels({"": lines}, "figure-2-functions", "Similarity by score"), caption)


def functions(xs: Sequence[float]) -> list[tuple[str, list[float], str, str]]:
    """(label, values, colour, dash) of each function."""
    return [
        ("exp(s): softmax", [exp(x) for x in xs], SERIES[1], "--"),
        ("1 + s + s²/2: Based", [1 + x + x * x / 2 for x in xs], SERIES[2], "-."),
        ("s²: ReBased, before γ and β", [x * x for x in xs], SERIES[0], "-"),
    ]
