"""Panels of inline SVG under one legend, in the page's own colours, light or dark; side by side, or below each other
on a phone."""

import io
import re
from collections.abc import Callable, Iterator, Mapping
from html import escape
from itertools import count
from typing import Any, NamedTuple

try:
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator
except ImportError as error:
    raise ImportError("figures need matplotlib, which is not installed: pip install 'rebased[lab]'") from error

__all__ = [  # figures take matplotlib's names from here, where its absence is explained
    "DASHES",
    "INK",
    "SERIES",
    "Axes",
    "Draw",
    "FixedLocator",
    "FuncFormatter",
    "MaxNLocator",
    "draw_panels",
    "looks",
]

# Matplotlib wants colours it knows: these stand for the page's CSS variables and are replaced in the SVG.
INK, GRID = "#010101", "#020202"
SERIES = tuple(f"#0301{i:02x}" for i in range(8))
VARIABLES = {INK: "var(--ink)", GRID: "var(--line)"} | {colour: f"var(--series-{i})" for i, colour in enumerate(SERIES)}
DASHES = {"-": "", "--": "7 3", "-.": "10 3 2 3", ":": "2 3"}  # a second sign beside the colour; as SVG has them
STYLE: dict[Any, Any] = {
    "text.color": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.edgecolor": GRID,
    "grid.color": GRID,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "font.family": "sans-serif",
    "svg.fonttype": "none",  # text stays text: it is small, it can be found and read aloud
    "svg.hashsalt": "rebased",
    "figure.constrained_layout.use": True,
}
Draw = Callable[[Axes], None]


class Size(NamedTuple):
    """Of a panel. It is scaled to its column, so inches say how large letters are beside it."""

    width: float
    height: float
    font: float


SIZES = {1: Size(5.0, 2.7, 9.5), 2: Size(4.2, 2.7, 9), 3: Size(3.4, 2.5, 9), 4: Size(2.8, 2.3, 9)}  # by columns


def looks() -> Iterator[dict[str, Any]]:
    """How the first, second, ... model is drawn, in every figure alike."""
    for i in count():
        dash = (i + i // len(SERIES)) % len(DASHES)
        yield {"color": SERIES[i % len(SERIES)], "ls": list(DASHES)[dash], "lw": 2, "ms": 6}


def draw_panels(panels: Mapping[str, Draw], name: str, title: str, columns: int | None = None) -> str:
    """What each function puts on its axes, below its heading, as an <svg> element that takes width and colours from the
    page. Panels share a legend, in which every label stands once."""
    columns = columns or (len(panels) if len(panels) < 4 else 2 if len(panels) == 4 else 3)
    handles: dict[str, Any] = {}
    drawn = []
    for i, (heading, draw) in enumerate(panels.items()):
        svg = draw_svg(draw, SIZES[columns], f"{name}-{i}", f"{title}: {heading}" if heading else title, handles)
        drawn.append(f'<div class="panel">{f"<p>{escape(heading)}</p>" if heading else ""}{svg}</div>')
    items = "".join(f"<li>{sample(handle)}{escape(label)}</li>" for label, handle in handles.items())
    return f'<ul class="legend">{items}</ul><div class="panels columns-{columns}">{"".join(drawn)}</div>'


def draw_svg(draw: Draw, size: Size, name: str, title: str, handles: dict[str, Any]) -> str:
    """One panel; lines that have a label are added to `handles` by it."""
    with matplotlib.rc_context(STYLE | {"font.size": size.font}):
        figure = Figure(figsize=size[:2])
        axes = figure.add_subplot()
        draw(axes)
        axes.grid(lw=0.6)
        axes.tick_params(length=0)
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
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


def sample(line: Any) -> str:
    """How a line of matplotlib's looks, for the legend."""
    colour = VARIABLES[line.get_color()]
    dash, marker, marks = line.get_linestyle(), line.get_marker(), ""
    if dash in DASHES:
        width = line.get_linewidth()
        marks = f'<path d="M0 6H36" stroke="{colour}" stroke-width="{width}" stroke-dasharray="{DASHES[dash]}"/>'
    if marker == "x":
        marks += f'<path d="M14 2L22 10M14 10L22 2" stroke="{colour}" stroke-width="2"/>'
    elif marker in ("o", "."):
        marks += f'<circle cx="18" cy="6" r="{4 if marker == "o" else 2.5}" fill="{colour}"/>'
    return f'<svg viewBox="0 0 36 12" aria-hidden="true">{marks}</svg>'
