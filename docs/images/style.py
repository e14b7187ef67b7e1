"""Colours of the documentation's figures, for light and dark pages, and how a figure is saved."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

INK = {"light": "#1f2328", "dark": "#e6edf3"}
GRID = {"light": "#d1d9e0", "dark": "#3d444d"}
COLOURS = {
    "light": {"rebased": "#0969da", "based": "#d9730d", "softmax": "#8b949e", "other": "#8250df"},
    "dark": {"rebased": "#58a6ff", "based": "#f0a050", "softmax": "#8b949e", "other": "#bc8cff"},
}


def save(name: str, folder: Path, draw: Callable[[Any, dict[str, str]], Any]) -> None:
    """Write NAME-light.svg and NAME-dark.svg. `draw(pyplot, colours)` returns the figure."""
    matplotlib.use("agg")
    from matplotlib import pyplot

    for theme, colours in COLOURS.items():
        ink, grid = INK[theme], GRID[theme]
        style = {"text.color": ink, "axes.labelcolor": ink, "xtick.color": ink, "ytick.color": ink, "font.size": 11}
        style |= {"axes.edgecolor": grid, "grid.color": grid, "axes.spines.top": False, "axes.spines.right": False}
        style |= {"svg.hashsalt": "rebased", "figure.constrained_layout.use": True, "mathtext.fontset": "cm"}
        with pyplot.rc_context(style):
            figure = draw(pyplot, colours)
            figure.savefig(folder / f"{name}-{theme}.svg", transparent=True, metadata={"Date": None})
            pyplot.close(figure)
