"""Logarithmic axes with numbers as people write them: 4,096 rather than a power of two, 0.5 rather than one of ten."""

from typing import Any


def logarithmic(axis: Any, y: bool = True) -> None:
    """T along x, by doublings; y, if wanted, by 1, 2 and 5."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    number = FuncFormatter(lambda value, _: f"{value:,g}" if value < 1e6 else f"{value / 1e6:g} M")
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter(number)
    axis.tick_params(axis="x", labelrotation=30)
    if y:
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter(number)
        axis.yaxis.set_minor_formatter(NullFormatter())
