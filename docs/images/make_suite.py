"""Draw the README's picture of the suite `quick` from its shipped results: python docs/images/make_suite.py [FOLDER]"""

import re
import sys
from importlib.resources import files
from math import ceil
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from docs.images.style import save

from rebased.report.drawing import SERIES, draw_axes
from rebased.report.suite.board import Board
from rebased.report.suite.figures import recall_by_bytes
from rebased.runs.collect import collect
from rebased.runs.shipped import MODELS, find_config
from rebased.runs.suite import load_suite

SUITE = Path("quick")


def read() -> Board:
    """What the shipped results show."""
    return Board(load_suite(find_config(SUITE, "suite")), list(collect([MODELS / "suite-quick.jsonl.gz"]).runs))


def draw(pyplot: Any, colours: dict[str, str]) -> Any:
    """The first figure of the suite's page: one panel per task that has results."""
    board = read()
    panels = recall_by_bytes(board).panels
    columns = min(2, len(panels))
    rows = ceil(len(panels) / columns)
    figure, grid = pyplot.subplots(rows, columns, figsize=(4.8 * columns, 0.4 + 2.7 * rows), squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    for axes, (task, panel) in zip(grid.flat, panels.items(), strict=False):
        draw_axes(axes, panel, {})
        axes.set_title(task, fontsize=11)
    if board.unfinished:
        figure.suptitle(board.unfinished, fontsize=11)
    return figure


def darken(path: Path) -> None:
    """Give the lines of a picture the colours that the page has on a dark screen."""
    template = files("rebased.report").joinpath("page.html").read_text(encoding="utf-8")
    dark = re.findall(r"--series-\d: (#\w+)", template)[len(SERIES) :]
    swap = dict(zip(SERIES, dark, strict=True))
    path.write_text(re.sub("|".join(swap), lambda found: swap[found[0]], path.read_text()))


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).parent
    save("suite", folder, draw)
    darken(folder / "suite-dark.svg")
