"""rebased configs: the shipped configs, listed by name or printed one at a time."""

import re
from itertools import takewhile

from rich.table import Table

from rebased.cli.terminal import Terminal
from rebased.config import did_you_mean
from rebased.runs.shipped import shipped_configs


def configs(name: str | None = None) -> None:
    """List the configs that come with the package, or print one of them.

    A printed config is a start for your own: rebased configs mqar/quick > mine.yaml

    Parameters
    ----------
    name
        Name of a shipped config, for example mqar/quick. Without it, all names are listed.
    """
    shipped = shipped_configs()
    if name is None:
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        for known, path in shipped.items():
            table.add_row(known, first_sentence(path.read_text(encoding="utf-8")))
        Terminal().print(table, highlight=False)
    elif name in shipped:
        print(shipped[name].read_text(encoding="utf-8"), end="")
    else:
        raise ValueError(f"no shipped config is named {name!r}; {did_you_mean(name, list(shipped))}")


def first_sentence(text: str) -> str:
    """Return the first sentence of the comment at the top of a YAML text, or "" if it begins with something else."""
    lines = takewhile(lambda line: line.startswith("#"), text.splitlines())
    comment = " ".join(line.removeprefix("#").strip() for line in lines)
    return re.split(r"(?<=[.?]) ", comment)[0]
