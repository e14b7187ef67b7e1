"""The figures of the demo's page: recall by number of pairs, and time by number of tokens."""

from collections.abc import Sequence
from functools import partial
from math import exp, log
from statistics import fmean

from rebased.config import grouped
from rebased.evaluate.attention_speed import Timing
from rebased.report.drawing import (
    INK,
    Axes,
    Panels,
    draw_chance,
    draw_line,
    draw_panels,
    look_of,
    named_looks,
    powers_of_two,
)
from rebased.report.tables import NONE
from rebased.runs.finished import Run

REFERENCE = "ReBased"  # the model that the others are compared with
OPERATOR, SOFTMAX = "poly_attention (ReBased)", "scaled_dot_product_attention (softmax)"


def label(run: Run) -> str:
    """The name of a run's model on the page: "ReBased, keys of 8"."""
    width = run.settings["model"]["mixers"][-1].get("key_width")
    return f"{run.model}, keys of {width}" if width else run.model


def labelled(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """The runs by `label`, in the order in which they first appear."""
    return grouped(runs, label)


def state_words(run: Run) -> str:
    """The bytes of a model's state after the longest sequence of the test: "5,008 B", "16,640 B and growing"."""
    now, later = run.state_bytes(run.seq_len), run.state_bytes(2 * run.seq_len)
    return NONE if now is None else f"{now:,} B" + (" and growing" if later != now else "")


def recalled(run: Run) -> dict[int, float]:
    """The accuracy by number of pairs after the last epoch."""
    return {int(pairs): accuracy for pairs, accuracy in run.epochs[-1]["test"]["by_pairs"].items()}


def most_pairs(runs: Sequence[Run]) -> int:
    """The largest number of pairs that was tested."""
    return max(max(recalled(run)) for run in runs)


def crossing(lengths: Sequence[int], ours: Sequence[float], theirs: Sequence[float]) -> float | None:
    """The length from which on `ours` is always smaller, interpolated on logarithmic axes; None if it never is.

    The first length if `ours` is smaller at all of them.
    """
    gaps = [log(one / other) for one, other in zip(ours, theirs, strict=True)]
    behind = max((i for i, gap in enumerate(gaps) if gap >= 0), default=-1)
    if behind == len(gaps) - 1:
        return None
    if behind < 0:
        return float(lengths[0])
    share = gaps[behind] / (gaps[behind] - gaps[behind + 1])
    return exp((1 - share) * log(lengths[behind]) + share * log(lengths[behind + 1]))


def recall_by_pairs(runs: Sequence[Run], shipped: Sequence[Run]) -> Panels:
    """Accuracy by number of pairs: bands of the shipped runs, dots of these, and a line through their means."""
    groups, bands, pairs = labelled(runs), labelled(shipped), sorted(recalled(runs[0]))

    def draw(axes: Axes) -> None:
        for name, look in named_looks(list(groups)).items():
            group, band = groups[name], bands.get(name, [])
            if band:
                columns = [[recalled(run)[n] for run in band] for n in pairs]
                lows, highs = (list(map(pick, columns)) for pick in (min, max))
                axes.fill_between(pairs, lows, highs, color=look["color"], alpha=0.2, lw=0)
            means = {n: fmean(recalled(run)[n] for run in group) for n in pairs}
            texts = [f"{name}, {n} pairs: {mean:.1%}" for n, mean in means.items()]
            draw_line(axes, pairs, list(means.values()), texts, **look, label=f"{name}: {state_words(group[0])}")
            dots = {"color": look["color"], "ls": "none", "marker": "o", "ms": 4, "alpha": 0.7}
            for run in group:
                axes.plot(pairs, [recalled(run)[n] for n in pairs], **dots)
        draw_chance(axes, runs[0].chance)
        axes.set(xlabel="pairs of key and value in a sequence", ylabel="recalled", ylim=(0, 1.03))
        axes.set_xticks(pairs)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")

    return draw_panels({"": draw}, "recall-by-pairs", "Recall by number of pairs")


def time_by_length(timings: Sequence[Timing]) -> Panels:
    """Milliseconds by number of tokens: forward, and forward and backward, with the crossing points."""
    lengths = [one.T for one in timings]

    def draw(ours: Sequence[float], theirs: Sequence[float], axes: Axes) -> None:
        for name, look, times in ((SOFTMAX, {"color": INK, "ls": "--"}, theirs), (OPERATOR, look_of(0), ours)):
            texts = [f"{name}, {T:,} tokens: {ms:.3g} ms" for T, ms in zip(lengths, times, strict=True)]
            draw_line(axes, lengths, times, texts, **look | {"lw": 2, "ms": 4}, marker="o", label=name)
        at = crossing(lengths, ours, theirs)
        if at is not None and at > lengths[0]:
            axes.axvline(at, color=INK, lw=1, ls=":", label="where they cross")
        powers_of_two(axes, lengths)
        axes.set(yscale="log", xlabel="tokens", ylabel="milliseconds")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")

    panels = {
        "forward": partial(draw, [one.poly for one in timings], [one.softmax for one in timings]),
        "forward and backward": partial(
            draw, [one.poly_both for one in timings], [one.softmax_both for one in timings]
        ),
    }
    return draw_panels(panels, "time-by-length", "Milliseconds by number of tokens")
