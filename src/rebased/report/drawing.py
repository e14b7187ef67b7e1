"""Panels of inline SVG with one legend. They take the page's colours, light or dark, and stack on narrow screens."""

import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from itertools import count
from typing import Any, NamedTuple

try:
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator
except ImportError as error:
    raise ImportError("figures need matplotlib, which is not installed: pip install 'rebased[lab]'") from error

__all__ = [  # figures import matplotlib's names from here: this file explains how to install it
    "DASHES",
    "INK",
    "SERIES",
    "Axes",
    "Draw",
    "FixedLocator",
    "FuncFormatter",
    "LogLocator",
    "MaxNLocator",
    "draw_panels",
    "looks",
    "named_looks",
]

# Placeholder colours for matplotlib. The SVG gets the page's CSS variables in their place.
INK, GRID = "#010101", "#020202"
SERIES = tuple(f"#0301{i:02x}" for i in range(8))
VARIABLES = {INK: "var(--ink)", GRID: "var(--line)"} | {colour: f"var(--series-{i})" for i, colour in enumerate(SERIES)}
DASHES = {"-": "", "--": "7 3", "-.": "10 3 2 3", ":": "2 3"}  # SVG dash patterns: lines differ in more than colour
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
    "svg.fonttype": "none",  # text stays text: small files, searchable, readable by screen readers
    "svg.hashsalt": "rebased",
    "figure.constrained_layout.use": True,
}
Draw = Callable[[Axes], None]


class Size(NamedTuple):
    """Size of a panel in inches, and of its font in points. The page scales a panel to its column."""

    width: float
    height: float
    font: float


SIZES = {
    1: Size(5.0, 2.7, 9.5),
    2: Size(4.2, 2.7, 9),
    3: Size(3.4, 2.5, 9),
    4: Size(2.8, 2.3, 9),
}  # by number of columns


def looks() -> Iterator[dict[str, Any]]:
    """Line styles for the first, second, ... model, the same in every figure."""
    for i in count():
        dash = (i + i // len(SERIES)) % len(DASHES)
        yield {"color": SERIES[i % len(SERIES)], "ls": list(DASHES)[dash], "lw": 2, "ms": 6}


def named_looks(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """One line style per name. ReBased gets the first, wherever it stands in a table."""
    ordered = sorted(dict.fromkeys(names), key=lambda name: not name.startswith("ReBased"))
    return dict(zip(ordered, looks(), strict=False))


def draw_panels(panels: Mapping[str, Draw], name: str, title: str, columns: int | None = None) -> str:
    """HTML of panels in a grid under one legend.

    `panels` has a function by heading that draws on matplotlib axes; `name` is a prefix for ids, unique on the page;
    `title` describes the figure to screen readers. The legend has every label once.
    """
    columns = columns or (len(panels) if len(panels) < 4 else 2 if len(panels) == 4 else 3)
    handles: dict[str, Any] = {}
    drawn = []
    for i, (heading, draw) in enumerate(panels.items()):
        svg = draw_svg(draw, SIZES[columns], f"{name}-{i}", f"{title}: {heading}" if heading else title, handles)
        drawn.append(f'<div class="panel">{f"<p>{escape(heading)}</p>" if heading else ""}{svg}</div>')
    items = "".join(f"<li>{sample(handle)}{escape(label)}</li>" for label, handle in handles.items())
    return f'<ul class="legend">{items}</ul><div class="panels columns-{columns}">{"".join(drawn)}</div>'


def draw_svg(draw: Draw, size: Size, name: str, title: str, handles: dict[str, Any]) -> str:
    """One panel as an <svg> element. Its labelled lines are added to `handles`, by label."""
    with matplotlib.rc_context(STYLE | {"font.size": size.font}):
        figure = Figure(figsize=size[:2])
        axes = figure.add_subplot()
        draw(axes)
        axes.grid(lw=0.6)
        axes.tick_params(length=0)
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
        file = io.StringIO()
        about = dict.fromkeys(
            ("Creator", "Date", "Format", "Type")
        )  # no metadata: the same records give the same bytes
        figure.savefig(file, format="svg", transparent=True, metadata=about)
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r' (?:width|height)="[^"]*pt"', "", svg, count=2)  # the page sets the width; viewBox stays
    svg = re.sub(r'( id="|url\(#|href="#)', rf"\1{name}-", svg)  # figures of one page must not share ids
    svg = svg.replace("<svg ", f'<svg role="img" aria-label="{escape(title)}" ', 1)
    for colour, variable in VARIABLES.items():
        svg = svg.replace(colour, variable)
    return svg


def sample(line: Any) -> str:
    """A small <svg> for the legend that looks like the matplotlib line."""
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
