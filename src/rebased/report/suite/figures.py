"""The figures of a suite's page: recall by bytes of state and by time of a training step, and effects of factors."""

from collections.abc import Mapping, Sequence
from functools import partial
from math import inf, isfinite, isnan
from statistics import fmean, median
from typing import Any

from rebased.report.drawing import SERIES, Axes, Interval, LogLocator, Panels, draw_intervals, draw_panels, hover
from rebased.report.suite.board import Board, SuiteCell
from rebased.report.suite.sentences import MARGIN
from rebased.report.suite.tables import effect_of

FAINT = SERIES[5]
COLOURS = tuple(colour for colour in SERIES if colour != FAINT)
GAP, TOP = 0.075, 1.02  # of recall: between two labels, and where the highest may stand
ROOM = 4.16  # the x axis ends at so many times the largest state: there the labels stand


def looks_of(board: Board) -> dict[str, dict[str, Any]]:
    """The line styles of the mixers that are drawn as lines: the reader's own first, thicker."""
    own = [name for name in board.own if name in board.mixers]
    names = [*own, *(name for name in board.suite.drawn if name in board.mixers and name not in own)]
    return {
        name: {"color": colour, "lw": 2.5 if name in own else 1.5, "marker": "o", "ms": 6 if name in own else 4}
        for name, colour in zip(names, COLOURS * len(names), strict=False)
    }


def apart(wanted: Mapping[str, float]) -> dict[str, float]:
    """Heights of labels near the wanted ones, at least GAP from one another."""
    order = sorted(wanted, key=lambda name: wanted[name])
    heights: dict[str, float] = {}
    floor, ceiling = -inf, TOP
    for name in order:
        heights[name] = max(wanted[name], floor)
        floor = heights[name] + GAP
    for name in reversed(order):  # pushed back below the top edge
        heights[name] = min(heights[name], ceiling)
        ceiling = heights[name] - GAP
    return heights


def recall_by_bytes(board: Board) -> Panels:
    """One panel per task: recall against bytes of state."""
    looks, sizes = looks_of(board), board.suite.state_bytes

    def draw(task: str, axes: Axes) -> None:
        ends: dict[str, float] = {}
        for m, mixer in enumerate(board.mixers):
            cells = [cell for cell in board.of(mixer) if cell.task == task]
            if not cells:
                continue
            xs: list[float] = [cell.layer_bytes or cell.budget or 0 for cell in cells]
            if cells[-1].budget is None:
                xs = [1.3 * max(sizes)]
            means = [cell.mean for cell in cells]
            drawn: Sequence[Any]  # artists
            if mixer in looks:
                errors = [
                    [0 if isnan(cell.interval[i]) else abs(cell.interval[i] - cell.mean) for cell in cells]
                    for i in (0, 1)
                ]
                bar = axes.errorbar(xs, means, yerr=errors, elinewidth=1, capsize=2, **looks[mixer])
                drawn = bar.get_children()
                ends[mixer] = means[-1]
            else:
                drawn = axes.plot(xs, means, color=FAINT, marker="o", ms=3, ls="none", alpha=0.6)
            for artist in drawn:
                artist.set_gid(f"of-{m}")
            hover(axes, xs, means, [describe(cell) for cell in cells], f"of-{m}")
        for mixer, height in apart(ends).items():
            write(axes, board, mixer, (1.45 * max(sizes), height), looks[mixer]["color"])
        axes.set(xscale="log", xlabel="bytes of state", ylabel="recall", ylim=(-0.03, 1.05))
        axes.set_xlim(0.7 * min(sizes), ROOM * max(sizes))
        axes.set_xticks(list(sizes), [f"{size:,}" for size in sizes])
        axes.minorticks_off()

    panels = {task: partial(draw, task) for task in board.tasks}
    return draw_panels(panels, "recall-by-bytes", "Recall by bytes of state")


def write(axes: Axes, board: Board, mixer: str, at: tuple[float, float], colour: str) -> None:
    """Write the name of a mixer beside its line or dot."""
    weight = "bold" if mixer in board.own else "normal"
    axes.text(*at, mixer, color=colour, va="center", weight=weight, gid=f"of-{board.mixers.index(mixer)}")


def describe(cell: SuiteCell) -> str:
    """A cell in words."""
    low, high = cell.interval
    span = "" if isnan(low) else f" ({low:.2f} to {high:.2f})"
    size = f"{cell.layer_bytes:,} B" if cell.layer_bytes else "a state of unknown size"
    return f"{cell.mixer}, {size}: {cell.mean:.2f}{span}"


def effects_by_task(board: Board) -> Panels:
    """One panel per task, one row per factor: what it adds to recall, with the interval of its test. All panels have
    the same scale, at least as wide as differences that do not matter."""
    known = {task: [one for one in board.effects(task) if isfinite(sum(one.interval))] for task in board.tasks}
    ends = [end for found in known.values() for one in found for end in one.interval]
    low, high = 1.1 * min(ends, default=0.0), 1.1 * max(ends, default=0.0)

    def draw(task: str, axes: Axes) -> None:
        rows = [Interval(one.a, one.effect.difference, *one.interval, effect_of(one)) for one in known[task]]
        draw_intervals(rows, xlabel="difference in recall")(axes)
        axes.set_xlim(min(low, -2 * MARGIN), max(high, 2 * MARGIN))

    panels = {task: partial(draw, task) for task, found in known.items() if found}
    return draw_panels(panels, "effects", "Effects of factors on recall, by task")


def timed(board: Board, speeds: Mapping[str, Sequence[float]]) -> dict[str, tuple[float, float]]:
    """By mixer: milliseconds per 1,000 tokens, and the mean recall at the largest state."""
    sizes = (max(board.suite.state_bytes), None)
    means = {mixer: [cell.mean for cell in board.of(mixer) if cell.budget in sizes] for mixer in speeds}
    return {mixer: (median(speeds[mixer]), fmean(found)) for mixer, found in means.items() if found}


def recall_by_time(board: Board, found: Mapping[str, tuple[float, float]]) -> Panels:
    """What `timed` found: one labelled dot per mixer."""
    looks = looks_of(board)

    def draw(axes: Axes) -> None:
        heights = apart({mixer: place[1] for mixer, place in found.items()})
        for mixer, (x, y) in found.items():
            colour, of = looks[mixer]["color"] if mixer in looks else FAINT, f"of-{board.mixers.index(mixer)}"
            axes.plot([x], [y], color=colour, marker="o", ls="none", ms=6, gid=of)
            write(axes, board, mixer, (1.06 * x, heights[mixer]), colour)
            hover(axes, [x], [y], [f"{mixer}: {x:.3g} ms, {y:.2f}"], of)
        xs = [x for x, _ in found.values()]
        axes.set(xscale="log", xlabel="milliseconds per 1,000 tokens", ylabel="recall", ylim=(-0.03, 1.05))
        axes.set_xlim(0.85 * min(xs), 1.9 * max(xs))
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5, 7)))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
        axes.minorticks_off()

    return draw_panels({"": draw}, "recall-by-time", "Recall by time of a training step")
