"""The figures of a report on synthetic tasks: accuracy by width, state, budget, epoch and slice."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import ceil, floor, isnan, log2
from typing import Any, Literal

from rebased.analysis.selection import expected_validation_performance
from rebased.config import grouped, plural
from rebased.report.drawing import (
    INK,
    SERIES,
    Axes,
    Draw,
    MaxNLocator,
    Panels,
    draw_band,
    draw_chance,
    draw_line,
    draw_panels,
    hover,
    named_looks,
    powers_of_two,
    thinned,
)
from rebased.report.synthetic.cells import Cell, Results
from rebased.report.tables import plus_minus

ACCURACY = (-0.03, 1.03)
PLACES = 16  # of a learning curve
SLICES: dict[Literal["by_pairs", "by_length"], tuple[str, str, str, str]] = {
    "by_pairs": ("kv_pairs", "pairs", "key-value pairs", "most in training"),
    "by_length": ("seq_len", "T =", "tokens T", "longest in training"),
}
"""The key in a segment of the task, the word before a number, the label of the axis, and that of the dotted line."""


def accuracy_by_width(results: Results) -> Panels:
    """Mean over seeds with the sample standard deviation, one panel per task; reference values as crosses."""
    styles = line_looks(results)

    def draw(cells: Sequence[Cell], axes: Axes) -> None:
        lines = grouped(cells, partial(line_name, results))
        aside = dodge([cell.d_model for cell in cells], list(lines))
        for name, line in lines.items():
            widths, colour = [cell.d_model * aside[name] for cell in line], styles[name]["color"]
            means = [cell.test.mean for cell in line]
            axes.plot(widths, means, **styles[name], marker="o", label=name)
            bars(axes, widths, line, colour)
            mark_reference(axes, list(zip(widths, line, strict=True)), colour)
            hover(axes, widths, means, [f"{name}, D = {cell.d_model}: {in_short(cell)}" for cell in line])
        draw_chance(axes, cells[0].any_run.chance)
        if any(cell.reference_value for cell in cells):
            axes.plot([], [], color=INK, ls="none", marker="x", ms=8, mew=2, label=results.known.name)
        powers_of_two(axes, [cell.d_model for cell in cells])
        axes.set(xlabel="width D", ylabel="test accuracy", ylim=ACCURACY)

    panels = {where: partial(draw, cells) for where, cells in by_task(results).items()}
    return draw_panels(panels, "by-width", "Test accuracy by model width", columns(results, panels))


def accuracy_by_state(results: Results) -> Panels:
    """Accuracy by bytes of state at the length of the task, one point per width and one panel per task."""
    styles = line_looks(results)

    def draw(cells: Sequence[Cell], axes: Axes) -> None:
        for name, line in grouped(cells, partial(line_name, results)).items():
            line = sorted(line, key=state_of)
            sizes, means = [state_of(cell) for cell in line], [cell.test.mean for cell in line]
            texts = [f"{name}, D = {c.d_model}: {in_short(c)}, {bytes_text(state_of(c))}" for c in line]
            draw_line(axes, sizes, means, texts, **styles[name], marker="o", label=name)
        draw_chance(axes, cells[0].any_run.chance)
        powers_of_two(axes, byte_ticks([state_of(cell) for cell in cells]), bytes_text)
        axes.set(xlabel="bytes of state per sequence, fp32", ylabel="test accuracy", ylim=ACCURACY)

    sized = {where: [cell for cell in cells if cell.state_bytes] for where, cells in by_task(results).items()}
    panels = {where: partial(draw, cells) for where, cells in sized.items() if cells}
    return draw_panels(panels, "by-state", "Test accuracy by bytes of state", columns(results, panels))


def state_of(cell: Cell) -> int:
    """The bytes of a cell's state; 0 where they are not known."""
    return cell.state_bytes or 0


def budgets(results: Results) -> Panels:
    """Expected best accuracy by number of learning rates tried, one panel per task and width."""
    styles = line_looks(results)

    def draw(cells: Sequence[Cell], axes: Axes) -> None:
        for cell in (cell for cell in cells if len(cell.lr_means) > 1):
            best, name = expected_validation_performance(cell.lr_means), line_name(results, cell)
            texts = [f"{name}, best of {n}: {accuracy:.3f}" for n, accuracy in enumerate(best, 1)]
            draw_line(axes, range(1, len(best) + 1), best, texts, **styles[name], marker=".", label=name)
        draw_chance(axes, cells[0].any_run.chance)
        axes.set(xlabel="learning rates tried", ylabel="expected accuracy", ylim=ACCURACY)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))

    panels = {where: partial(draw, cells) for where, cells in by_place(results).items() if tunable(cells)}
    title = "Expected accuracy by number of learning rates tried"
    return draw_panels(panels, "budget", title, columns(results, panels))


def tunable(cells: Sequence[Cell]) -> bool:
    """Whether some cell has several learning rates."""
    return any(len(cell.lr_means) > 1 for cell in cells)


def mean_curves(results: Results) -> Panels:
    """Test accuracy by epoch at the chosen learning rate: the mean over seeds, and a band from worst to best."""
    styles = line_looks(results)

    def draw(cells: Sequence[Cell], axes: Axes) -> None:
        for cell in cells:
            curves = [run.accuracies for run in cell.chosen.values() if run.epochs]
            if curves:
                kept, name = thinned(max(map(len, curves)), PLACES), line_name(results, cell)
                values = [[curve[min(i, len(curve) - 1)] for curve in curves] for i in kept]  # its last value stays
                at, texts = [i + 1 for i in kept], [f"{name}, epoch {i + 1}" for i in kept]
                draw_band(axes, at, values, texts, **styles[name] | {"lw": 1.5, "label": name})
        draw_chance(axes, cells[0].any_run.chance)
        axes.set(xlabel="epoch", ylabel="test accuracy", ylim=ACCURACY)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))

    panels = {where: partial(draw, cells) for where, cells in by_place(results).items()}
    return draw_panels(panels, "curves", "Test accuracy by epoch, mean over seeds", columns(results, panels))


def accuracy_by_slice(results: Results, kind: Literal["by_pairs", "by_length"]) -> Panels:
    """Accuracy by number of pairs or by length, of the cells that were tested on several."""
    styles = line_looks(results)
    key, word, label, dotted = SLICES[kind]

    def draw(cells: Sequence[Cell], axes: Axes) -> None:
        for cell in cells:
            parts, name = cell.slices(kind), line_name(results, cell)
            texts = [f"{name}, {word} {part}: {accuracy:.3f}" for part, accuracy in parts.items()]
            draw_line(axes, list(parts), list(parts.values()), texts, **styles[name], marker="o", label=name)
        draw_chance(axes, cells[0].any_run.chance)
        trained = max(segment[key] for segment in cells[0].any_run.settings["task"]["train"])
        axes.axvline(trained, color=INK, lw=1, ls=":", label=dotted)
        powers_of_two(axes, [part for cell in cells for part in cell.slices(kind)])
        axes.set(xlabel=label, ylabel="accuracy", ylim=ACCURACY)

    several = {
        where: cells for where, cells in by_place(results).items() if any(len(cell.slices(kind)) > 1 for cell in cells)
    }
    panels = {where: partial(draw, cells) for where, cells in several.items()}
    name, title = kind.replace("_", "-"), f"Accuracy {kind.replace('_', ' ')}"
    return draw_panels(panels, name, title, columns(results, panels))


def columns(results: Results, panels: Mapping[str, Draw]) -> int | None:
    """The number of columns that gives one row per task, if that is 2 to 4; else None."""
    each, rest = divmod(len(panels), len(results.tasks))
    return each if rest == 0 and 2 <= each <= 4 else None


def crowded(results: Results) -> bool:
    """Whether there are more models than colours. Models that differ only in settings then get panels of their own."""
    return len(results.models) > len(SERIES)


def line_name(results: Results, cell: Cell) -> str:
    """The label of a cell's line."""
    return cell.model.kind if crowded(results) else str(cell.model)


def line_looks(results: Results) -> dict[str, dict[str, Any]]:
    """One line style per model in all figures of a page."""
    return named_looks([model.kind if crowded(results) else str(model) for model in results.models])


def by_task(results: Results) -> dict[str, list[Cell]]:
    """The cells of each panel, if panels are tasks."""
    return in_panels(results, lambda cell: cell.task)


def by_place(results: Results) -> dict[str, list[Cell]]:
    """The cells of each panel, if panels are tasks and widths."""
    return in_panels(results, lambda cell: f"{cell.task}, D = {cell.d_model}")


def in_panels(results: Results, where: Callable[[Cell], str]) -> dict[str, list[Cell]]:
    """Cells by the heading of their panel, which `where` gives."""

    def heading(cell: Cell) -> str:
        return where(cell) + (f", {cell.model.differences}" if crowded(results) and cell.model.differences else "")

    return grouped(sorted(results.cells, key=lambda cell: (results.tasks.index(cell.task), cell.d_model)), heading)


def dodge(places: Sequence[int], names: Sequence[str]) -> dict[str, float]:
    """A factor per line for its x values, so that error bars at one x of a logarithmic axis stand side by side."""
    each = 0.012 * log2(max(places) / min(places))
    return {name: 2 ** (each * (i - (len(names) - 1) / 2)) for i, name in enumerate(names)}


def bars(axes: Axes, places: Sequence[float], cells: Sequence[Cell], colour: str) -> None:
    """Draw the sample standard deviation of each cell; a single seed has none."""
    means, sds = [cell.test.mean for cell in cells], [0 if isnan(cell.test.sd) else cell.test.sd for cell in cells]
    axes.errorbar(places, means, sds, ecolor=colour, fmt="none", capsize=2, elinewidth=1)


def mark_reference(axes: Axes, points: Sequence[tuple[float, Cell]], colour: str) -> None:
    """Draw the reference value of each cell that has one, as a cross."""
    known = [(x, cell, value) for x, cell in points if (value := cell.reference_value)]
    if known:
        xs, means = [x for x, _, _ in known], [value.mean for _, _, value in known]
        axes.plot(xs, means, color=colour, ls="none", marker="x", ms=8, mew=2)
        hover(axes, xs, means, [f"{c.known.name}, {c.model}, D = {c.d_model}: {value}" for _, c, value in known])


def in_short(cell: Cell) -> str:
    """'0.708 ± 0.089, 5 seeds, lr 0.003'"""
    return f"{plus_minus(cell.test)}, {plural(cell.test.n, 'seed')}, lr {cell.choice.lr:g}"


def byte_ticks(sizes: Sequence[int]) -> list[float]:
    """At most five powers of two between the smallest and the largest size, or these two sizes themselves."""
    low, high = log2(min(sizes)), log2(max(sizes))
    powers = range(ceil(low), floor(high) + 1)
    if len(powers) < 2:
        return sorted({float(min(sizes)), float(max(sizes))})
    return [2.0**power for power in powers[:: ceil(len(powers) / 5)]]


def bytes_text(size: float) -> str:
    """'1.5 KiB'"""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024 or unit == "MiB":
            break
        size /= 1024
    return f"{size:.3g} {unit}"
