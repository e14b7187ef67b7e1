"""Figures as inline SVG: a pure function of records each, drawn in the page's own colours, light or dark."""

import io
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape
from itertools import count
from math import nan
from typing import Any

from rebased.report.runs import Run, by_model

try:
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator
except ImportError as error:
    raise ImportError("figures need matplotlib, which is not installed: pip install 'rebased[lab]'") from error

# Matplotlib wants colours it knows: these stand for the page's CSS variables and are replaced in the SVG.
INK, GRID = "#010101", "#020202"
SERIES = tuple(f"#0301{i:02x}" for i in range(8))
VARIABLES = {INK: "var(--ink)", GRID: "var(--line)"} | {colour: f"var(--series-{i})" for i, colour in enumerate(SERIES)}
DASHES = ("-", "--", "-.", ":")  # a second sign beside the colour, for those who see few colours
STYLE: dict[Any, Any] = {
    "text.color": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.edgecolor": GRID,
    "grid.color": GRID,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "font.size": 11,
    "font.family": "sans-serif",
    "svg.fonttype": "none",  # text stays text: it is small, it can be found and read aloud
    "svg.hashsalt": "rebased",
    "figure.constrained_layout.use": True,
}
SIZE = (7.2, 3.6)  # inches; on the page a figure is as wide as the column


def learning_curves(runs: Sequence[Run]) -> str:
    """Test accuracy by epoch, a line a run. A dot marks where a run ended, early if it had solved the task."""

    def draw(axes: Axes) -> None:
        for look, (model, group) in zip(looks(), by_model(runs).items(), strict=False):
            for n, run in enumerate(group):
                epochs = [line["epoch"] for line in run.epochs]
                axes.plot(epochs, run.accuracies, **look, marker="o", markevery=[-1], label=None if n else model)
        chance = 2 / runs[0].config.task.vocab_size  # half of the tokens are values
        axes.axhline(chance, color=INK, lw=1, ls=":", label="guessing")
        last = max(run.config.train.epochs for run in runs)
        axes.set(xlabel="epoch", ylabel="test accuracy", ylim=(0, 1.03), xlim=(0.8, last + 0.2))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))

    return draw_svg({"": draw}, "learning-curves", "Test accuracy by epoch, a line a run")


def state_growth(runs: Sequence[Run], longest: int = 8192) -> str:
    """KiB of state by number of tokens read, up to so many: computed from the shapes of the models."""
    here = max(run.seq_len for run in runs)

    def draw(axes: Axes) -> None:
        lengths = [max(here // 4, 1)]
        while lengths[-1] < longest:
            lengths.append(2 * lengths[-1])
        for look, (model, group) in zip(looks(), by_model(runs).items(), strict=False):
            sizes = [group[0].state_bytes(length) for length in lengths]
            axes.plot(lengths, [(size or nan) / 1024 for size in sizes], **look, label=model)
        axes.axvline(here, color=INK, lw=1, ls=":", label=f"this task, T = {here}")
        axes.set(xscale="log", yscale="log", xlabel="tokens read", ylabel="KiB of state a sequence")
        axes.set_xticks(lengths[::2], [f"{length:,}" for length in lengths[::2]])
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        axes.minorticks_off()

    return draw_svg({"": draw}, "state-growth", "KiB of state by number of tokens read")


def looks() -> Iterator[dict[str, Any]]:
    """How the first, second, ... model is drawn, in every figure alike."""
    for i in count():
        dash = (i + i // len(SERIES)) % len(DASHES)
        yield {"color": SERIES[i % len(SERIES)], "ls": DASHES[dash], "lw": 2, "ms": 6}


def draw_svg(panels: Mapping[str, Callable[[Axes], None]], name: str, title: str) -> str:
    """What each function puts on its axes, below its heading, as one <svg> element that takes its width and colours
    from the page. Panels share a legend, in which every label stands once."""
    columns = 1 if len(panels) == 1 else 2 if len(panels) in (2, 4) else 3
    rows = -(-len(panels) // columns)
    font = STYLE["font.size"] if columns == 1 else 9
    with matplotlib.rc_context(STYLE | {"font.size": font}):
        figure, handles = Figure(), dict[str, Any]()
        headings = [in_lines(heading, int(0.9 * letters(font) / columns)) for heading in panels]
        for i, (heading, draw) in enumerate(zip(headings, panels.values(), strict=True), start=1):
            axes = figure.add_subplot(rows, columns, i)
            draw(axes)
            axes.set_title("\n".join(heading), fontsize="medium")
            axes.grid(lw=0.6)
            axes.tick_params(length=0)
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
                handles.setdefault(label, handle)
        wide = legend_columns(handles, font)
        lines = -(-len(handles) // wide) + rows * (max(map(len, headings)) - 1)
        height = SIZE[1] - 0.4 if columns == 1 else 0.3 + rows * (2.9 if columns == 2 else 2.3)
        figure.set_size_inches(SIZE[0], height + lines * font / 45)
        figure.legend(
            handles.values(),
            handles.keys(),
            loc="outside upper left",
            ncols=wide,
            frameon=False,
            handlelength=2.6,
        )
        file = io.StringIO()
        about = dict.fromkeys(("Creator", "Date", "Format", "Type"))  # no metadata: equal records, equal pictures
        figure.savefig(file, format="svg", transparent=True, metadata=about)
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r' (?:width|height)="[^"]*pt"', "", svg, count=2)  # the page says how wide; viewBox stays
    svg = re.sub(r'( id="|url\(#|href="#)', rf"\1{name}-", svg)  # figures of one page must not share ids
    svg = svg.replace("<svg ", f'<svg role="img" aria-label="{escape(title)}" ', 1)
    for colour, variable in VARIABLES.items():
        svg = svg.replace(colour, variable)
    return svg


def legend_columns(labels: Iterable[str], font: float) -> int:
    """As many as fit side by side; a line's sample is as wide as eleven letters."""
    return max(1, min(5, int(letters(font) / (11 + max((len(label) for label in labels), default=0)))))


def in_lines(heading: str, width: int) -> list[str]:
    """Broken where it is too long, and not within 'D = 64'."""
    lines = textwrap.wrap(heading.replace(" = ", "\u00a0=\u00a0"), width)
    return [line.replace("\u00a0", " ") for line in lines]


def letters(font: float) -> float:
    """How many fit into the width of a figure."""
    return SIZE[0] * 72 / (0.55 * font)
