"""Panels with one legend: inline SVG that takes the page's colours, light or dark, or a file as SVG, PNG or PDF."""

import io
import re
from collections.abc import Callable, Mapping, Sequence
from html import escape
from math import ceil
from statistics import fmean
from typing import Any, Literal, NamedTuple

try:
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, MaxNLocator  # noqa: F401, figures take them here
except ImportError as error:
    raise ImportError("figures need matplotlib, which is not installed: pip install 'rebased[lab]'") from error

# The page's light colours (page.html), which files have. In the page's SVG its CSS variables stand in their place.
INK, GRID = "#1f2328", "#d1d9e0"
SERIES = ("#0969da", "#c2570c", "#1a7f5a", "#8250df", "#a40e4c", "#57606a", "#007a8a", "#8a6d00")
VARIABLES = {INK: "var(--ink)", GRID: "var(--line)"} | {colour: f"var(--series-{i})" for i, colour in enumerate(SERIES)}
DASHES = {"-": "", "--": "7 3", "-.": "10 3 2 3", ":": "2 3"}  # SVG dash patterns: lines differ in more than colour
STYLE: dict[Any, Any] = {
    "font.sans-serif": ["DejaVu Sans"],  # it comes with matplotlib; a list of ten would stand in every label of an SVG
    "text.color": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.edgecolor": GRID,
    "grid.color": GRID,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "font.family": "sans-serif",
    "text.parse_math": False,  # a name with $ is a name
    "svg.fonttype": "none",  # text stays text: small files, searchable, readable by screen readers
    "svg.hashsalt": "rebased",
    "pdf.fonttype": 42,  # fonts are embedded as they are: publishers refuse matplotlib's default, type 3
    "figure.constrained_layout.use": True,
}
Draw = Callable[[Axes], None]
Format = Literal["svg", "png", "pdf"]
FORMATS: dict[Format, dict[str, str | None]] = {  # without dates and versions: the same records give the same bytes
    "svg": dict.fromkeys(("Creator", "Date", "Format", "Type")),
    "png": {"Software": None},
    "pdf": dict.fromkeys(("CreationDate", "Creator", "Producer")),
}
DOTS_PER_INCH = 200  # of a PNG
HOVER = "rebased_hover"  # the attribute of axes that holds what `hover` was given
NEAR = 6  # points: the radius of a place to point at
ROW = 0.18  # inches: the height of a row of intervals


class Size(NamedTuple):
    """Size of a panel in inches, and of its font in points. The page scales a panel to its column."""

    width: float
    height: float
    font: float


SIZES = {1: Size(5.0, 2.7, 9.5), 2: Size(4.2, 2.7, 9), 3: Size(3.4, 2.5, 9), 4: Size(2.8, 2.3, 9)}
"""By number of columns."""


def look_of(i: int) -> dict[str, Any]:
    """The line style of model i, the same in every figure."""
    dash = (i + i // len(SERIES)) % len(DASHES)
    return {"color": SERIES[i % len(SERIES)], "ls": list(DASHES)[dash], "lw": 2, "ms": 6}


def named_looks(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """One line style per name. ReBased gets the first, wherever it stands in a table."""
    ordered = sorted(dict.fromkeys(names), key=lambda name: not name.startswith("ReBased"))
    return {name: look_of(i) for i, name in enumerate(ordered)}


def hover(axes: Axes, xs: Sequence[float], ys: Sequence[float], texts: Sequence[str], of: str = "") -> None:
    """Tooltips at these places, given in data coordinates. `of` is their CSS class, if any."""
    vars(axes).setdefault(HOVER, []).extend((x, y, of, text) for x, y, text in zip(xs, ys, texts, strict=True))


def draw_line(axes: Axes, xs: Sequence[float], ys: Sequence[float], texts: Sequence[str], **look: Any) -> None:
    """Draw a line; each point has a text shown under the pointer."""
    axes.plot(xs, ys, **look)
    hover(axes, xs, ys, texts)


def draw_band(
    axes: Axes, at: Sequence[float], columns: Sequence[Sequence[float]], names: Sequence[str], **look: Any
) -> None:
    """A line through the means of columns of values, in a band from the least to the greatest of each. `names` say
    what the columns are."""
    means, lows, highs = ([pick(values) for values in columns] for pick in (fmean, min, max))
    found = zip(names, means, lows, highs, strict=True)
    draw_line(
        axes, at, means, [f"{name}: {mean:.3f} ({low:.3f} to {high:.3f})" for name, mean, low, high in found], **look
    )
    axes.fill_between(at, lows, highs, color=look["color"], alpha=0.15, lw=0)


def thinned(n: int, places: int) -> range:
    """At most so many of the numbers below n, evenly spaced, the last one among them."""
    return range(n - 1, -1, -max(1, ceil(n / places)))[::-1]


def draw_chance(axes: Axes, chance: float | None) -> None:
    """A dotted line at the accuracy of guessing, named in the legend; nothing where that is not known."""
    if chance is not None:
        axes.axhline(chance, color=INK, lw=1, ls=":", label=f"chance {chance:.2g}")


class Interval(NamedTuple):
    """A difference with its interval, and beside it what others report."""

    label: str
    mean: float
    low: float
    high: float
    text: str  # shown under the pointer
    series: str = ""  # its name in the legend, if it has one
    colour: str = SERIES[0]
    other: tuple[float, float, float] | None = None  # reported mean, low and high


def draw_intervals(rows: Sequence[Interval], others: str = "", xlabel: str = "difference") -> Draw:
    """One row per difference, from above, and a line at 0. `others` is the legend's name for what others report, which
    stands above ours as a cross. A panel with many rows is higher, on a page."""

    def draw(axes: Axes) -> None:
        figure = axes.figure
        assert isinstance(figure, Figure)
        figure.set_figheight(max(figure.get_figheight(), ROW * len(rows) + 0.7))  # 0.7: the axis and its label
        aside = 0.14 if others else 0
        for n, row in enumerate(rows):
            axes.hlines(-n - aside, row.low, row.high, color=row.colour, lw=2)
            axes.plot([row.mean], [-n - aside], color=row.colour, marker="o", ms=5, ls="none", label=row.series)
            hover(axes, [row.mean], [-n - aside], [row.text])
            if row.other:
                mean, low, high = row.other
                axes.hlines(-n + aside, low, high, color=SERIES[1], lw=1)
                axes.plot([mean], [-n + aside], color=SERIES[1], marker="x", ms=5, ls="none", label=others)
        axes.axvline(0, color=INK, lw=1, ls=":")
        axes.set_yticks([-n for n in range(len(rows))], [row.label for row in rows], fontsize=8)
        axes.set(ylim=(-len(rows) + 0.4, 0.6), xlabel=xlabel)

    return draw


def powers_of_two(axes: Axes, ticks: Sequence[float], shown: Callable[[float], str] = str) -> None:
    """Make the x axis logarithmic with base 2, with these ticks."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(set(ticks)), [shown(tick) for tick in sorted(set(ticks))])
    axes.minorticks_off()


class Panels(NamedTuple):
    """A figure as data: panels in a grid under one legend, which has every label once."""

    panels: Mapping[str, Draw]  # by heading: a function that draws on matplotlib axes
    name: str  # of its file, and a prefix for ids: unique on a page
    title: str  # describes the figure to screen readers
    columns: int

    def to_html(self) -> str:
        """The legend and the panels as HTML. The panels stack on narrow screens."""
        handles: dict[str, Any] = {}
        drawn = {}
        for i, (heading, draw) in enumerate(self.panels.items()):
            title = f"{self.title}: {heading}" if heading else self.title
            drawn[heading] = draw_svg(draw, SIZES[self.columns], f"{self.name}-{i}", title, handles)
        items = "".join(f"<li>{sample(handle)}{escape(label)}</li>" for label, handle in handles.items())
        return f'<ul class="legend">{items}</ul>{grid(drawn, self.columns)}'

    def to_file(self, kind: Format) -> bytes:
        """The figure as a file, in the light colours."""
        size, rows = SIZES[self.columns], ceil(len(self.panels) / self.columns)
        with matplotlib.rc_context(STYLE | {"font.size": size.font}):
            figure = Figure()
            handles: dict[str, Any] = {}
            for i, (heading, draw) in enumerate(self.panels.items()):
                axes = figure.add_subplot(rows, self.columns, i + 1)
                draw_axes(axes, draw, handles)
                axes.set_title(heading, fontsize=size.font)
            room = self.columns * size.width * 72 / size.font / 0.6  # letters
            widest = max(map(len, handles), default=0) + 7  # with the line before a label
            across = max(1, min(len(handles), int(room / widest)))
            legend = ceil(len(handles) / across) * 1.6 * size.font / 72  # inches
            figure.set_size_inches(self.columns * size.width, rows * (size.height + 0.2) + legend)
            figure.legend(list(handles.values()), list(handles), loc="outside upper left", ncols=across, frameon=False)
            file = io.BytesIO()
            figure.savefig(file, format=kind, metadata=FORMATS[kind], dpi=DOTS_PER_INCH)
        return file.getvalue()


def draw_panels(panels: Mapping[str, Draw], name: str, title: str, columns: int | None = None) -> Panels:
    """The panels in as many columns as given, or as fit their number."""
    return Panels(panels, name, title, columns or (len(panels) if len(panels) < 4 else 2 if len(panels) == 4 else 3))


def grid(drawn: Mapping[str, str], columns: int) -> str:
    """HTML of <svg> elements in a grid, each under its heading, if that is not empty."""
    panels = (
        f'<div class="panel">{f"<p>{escape(heading)}</p>" if heading else ""}{svg}</div>'
        for heading, svg in drawn.items()
    )
    return f'<div class="panels columns-{columns}">{"".join(panels)}</div>'


def draw_axes(axes: Axes, draw: Draw, handles: dict[str, Any]) -> None:
    """Draw one panel. Its labelled lines are added to `handles`, by label."""
    draw(axes)
    axes.grid(lw=0.6)
    axes.tick_params(length=0)
    for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
        handles.setdefault(label, handle)


def draw_svg(draw: Draw, size: Size, name: str, title: str, handles: dict[str, Any]) -> str:
    """One panel as an <svg> element. Its labelled lines are added to `handles`, by label."""
    with matplotlib.rc_context(STYLE | {"font.size": size.font}):
        figure = Figure(figsize=size[:2])
        axes = figure.add_subplot()
        draw_axes(axes, draw, handles)
        file = io.StringIO()
        for patch in (figure.patch, *(each.patch for each in figure.axes)):
            patch.set(facecolor="none", edgecolor="none")
        FigureCanvasSVG(figure).print_svg(file, metadata=FORMATS["svg"])  # savefig would draw once more, for the layout
    svg = file.getvalue()
    svg = re.sub(r"(\d\.\d\d)\d+", r"\1", svg[svg.index("<svg") :])  # a hundredth of a point is fine enough
    svg = re.sub(r' (?:width|height)="[^"]*pt"', "", svg, count=2)  # the page sets the width; viewBox stays
    svg = re.sub(r"\s*\n\s*", " ", svg).replace("> <", "><")
    svg = re.sub(r'<g id="(of-\d+)">', r'<g class="\1">', svg)  # an artist's gid: filters of a page hide it
    svg = re.sub(r'<g id="[^"]*">', "<g>", svg)  # nothing refers to other groups
    svg = re.sub(r'( id="|url\(#|href="#)', rf"\1{name}-", svg)  # figures of one page must not share ids
    svg = svg.replace("<svg ", f'<svg role="img" aria-label="{escape(title)}" ', 1)
    for colour, variable in VARIABLES.items():
        svg = svg.replace(colour, variable)
    return svg.replace("</svg>", f"{places(axes, figure)}</svg>")


def places(axes: Axes, figure: Figure) -> str:
    """Invisible circles with titles where `hover` said: browsers show a title to who points there."""
    scale, height, circles = 72 / figure.dpi, figure.get_figheight() * 72, ""
    for *at, of, text in getattr(axes, HOVER, []):
        x, y = axes.transData.transform(at)
        place = f'cx="{x * scale:.1f}" cy="{height - y * scale:.1f}"' + (f' class="{of}"' if of else "")
        circles += f'<circle {place} r="{NEAR}"><title>{escape(text)}</title></circle>'
    return f'<g class="places" fill-opacity="0">{circles}</g>' if circles else ""


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
