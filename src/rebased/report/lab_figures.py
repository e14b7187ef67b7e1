"""The figures of `rebased report`: the paper's Figures 1, 3, 4 and 7 from one's own records, and some more."""

from collections.abc import Callable, Iterator, Sequence
from math import isnan
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, NullFormatter

from rebased.report.cells import Cell, Results
from rebased.report.figures import INK, draw_svg, looks

ACCURACY = (-0.03, 1.03)


def model_looks(results: Results) -> dict[str, dict[str, Any]]:
    """One look a model in all figures of a page."""
    return dict(zip(results.models, looks(), strict=False))


def accuracy_by_width(results: Results) -> str:
    """Mean over seeds with the sample's standard deviation, a panel a task; the paper's means as crosses."""
    styles = model_looks(results)

    def panel(task: str) -> Callable[[Axes], None]:
        def draw(axes: Axes) -> None:
            for model, cells in lines_of(results.of_task(task), results.models):
                widths, means = [cell.d_model for cell in cells], [cell.test.mean for cell in cells]
                errors = [0 if isnan(cell.test.sd) else cell.test.sd for cell in cells]
                axes.errorbar(widths, means, errors, **styles[model], marker="o", capsize=2, elinewidth=1, label=model)
                known = [cell for cell in cells if cell.paper]
                axes.plot(
                    [cell.d_model for cell in known],
                    [cell.paper.mean for cell in known if cell.paper],
                    color=styles[model]["color"], ls="none", marker="x", ms=7,
                )  # fmt: skip
            if any(cell.paper for cell in results.of_task(task)):
                axes.plot([], [], color=INK, ls="none", marker="x", label="paper")
            log_widths(axes, [cell.d_model for cell in results.of_task(task)])
            axes.set(xlabel="width D", ylabel="test accuracy", ylim=ACCURACY)

        return draw

    panels = {task: panel(task) for task in results.tasks}
    return draw_svg(panels, "by-width", "Test accuracy by model width, a panel a task")


def lines_of(cells: Sequence[Cell], models: Sequence[str]) -> Iterator[tuple[str, list[Cell]]]:
    for model in models:
        own = [cell for cell in cells if cell.model == model]
        if own:
            yield model, own


def log_widths(axes: Axes, widths: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    ticks = sorted(set(widths))
    axes.set_xticks(ticks, [str(width) for width in ticks])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.minorticks_off()


def mean_curves(results: Results) -> str:
    """Test accuracy by epoch at the chosen rate: the mean over seeds, and between which values they lie."""
    styles = model_looks(results)
    places = list(dict.fromkeys((cell.task, cell.d_model) for cell in results.cells))

    def panel(task: str, d_model: int) -> Callable[[Axes], None]:
        def draw(axes: Axes) -> None:
            for model in results.models:
                cell = results.find(task, model, d_model)
                curves = [run.accuracies for run in cell.chosen.values() if run.epochs] if cell else []
                if curves:
                    columns = list(zip(*extended(curves), strict=True))
                    epochs = range(1, len(columns) + 1)
                    axes.plot(epochs, [fmean(values) for values in columns], **styles[model] | {"lw": 1.5}, label=model)
                    lows, highs = [min(values) for values in columns], [max(values) for values in columns]
                    axes.fill_between(epochs, lows, highs, color=styles[model]["color"], alpha=0.15, lw=0)
            axes.set(xlabel="epoch", ylabel="test accuracy", ylim=ACCURACY)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))

        return draw

    return draw_svg(
        {f"{task}, D = {d_model}": panel(task, d_model) for task, d_model in places},
        "curves",
        "Test accuracy by epoch, mean over seeds",
    )


def extended(curves: Sequence[Sequence[float]]) -> list[list[float]]:
    """A run that stopped because it had solved the task stays where it was while others go on."""
    longest = max(map(len, curves))
    return [[*curve, *[curve[-1]] * (longest - len(curve))] for curve in curves]
