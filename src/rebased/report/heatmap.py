"""Matrices as inline SVG: darker cells for larger numbers, in the page's colours, without raster images."""

from collections.abc import Sequence
from html import escape
from itertools import groupby

LEVELS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.9)
"""Cells of at least so much get the first, second, ... shade; smaller ones none. Steps are finer near zero, where
attention is noisy."""
MARK, FRAME = 0.006, 0.004
"""Widths of lines as shares of a matrix's width: 2 and 1 pixels of a panel of 300."""
MAX_LINE = 0.2  # of a cell: in a wide matrix a line hides no cell


def heatmap(matrix: Sequence[Sequence[float]], title: str, marks: Sequence[tuple[int, int]] = ()) -> str:
    """An <svg> of a matrix with entries from 0 to 1, rows from the top. `marks` are cells (row, column) to outline."""
    rows, columns = len(matrix), len(matrix[0])
    shades: dict[int, list[str]] = {}
    for y, row in enumerate(matrix):
        x = 0
        for level, cells in groupby(row, level_of):
            length = len(list(cells))
            if level:
                shades.setdefault(level, []).append(f"M{x} {y}h{length}v1h-{length}z")
            x += length
    paths = "".join(
        f'<path d="{"".join(cells)}" fill="var(--series-0)" fill-opacity="{opacity(level):.2f}"/>'
        for level, cells in sorted(shades.items())
    )
    outlines = "".join(f"M{x} {y}h1v1h-1z" for y, x in marks)
    mark, edge = (f"{min(MAX_LINE, share * columns):.3g}" for share in (MARK, FRAME))
    paths += f'<path d="{outlines}" fill="none" stroke="var(--series-1)" stroke-width="{mark}"/>' if outlines else ""
    frame = f'<path d="M0 0h{columns}v{rows}h-{columns}z" fill="none" stroke="var(--line)" stroke-width="{edge}"/>'
    return (
        f'<svg role="img" aria-label="{escape(title)}" viewBox="-{edge} -{edge} {columns + 2 * float(edge):g} '
        f'{rows + 2 * float(edge):g}" '
        f'shape-rendering="crispEdges">{paths}{frame}</svg>'
    )


def level_of(value: float) -> int:
    """The shade of an entry: 0 for none, up to the number of LEVELS."""
    return sum(value >= bound for bound in LEVELS)


def opacity(level: int) -> float:
    """The opacity of a shade, from faint to opaque."""
    return 0.12 + 0.88 * (level / len(LEVELS)) ** 1.3


def scale() -> str:
    """A legend of the shades, in words and cells."""
    cells = "".join(
        f'<li><svg viewBox="0 0 36 12" aria-hidden="true"><path d="M0 0h36v12h-36z" fill="var(--series-0)" '
        f'fill-opacity="{opacity(level):.2f}"/></svg>≥ {bound:g}</li>'
        for level, bound in enumerate(LEVELS, start=1)
    )
    mark = (
        '<li><svg viewBox="0 0 36 12" aria-hidden="true"><path d="M13 1h10v10h-10z" fill="none" '
        'stroke="var(--series-1)" stroke-width="2"/></svg>where the answer stands</li>'
    )
    return f'<ul class="legend">{cells}{mark}</ul>'
