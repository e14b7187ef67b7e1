"""Tables 4 and 9: parameter counts, computed from the models themselves."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from rebased.models.paper import TABLE_4, TABLE_9, count_parameters
from rebased.report.paper.exhibits import BY_NAME
from rebased.report.paper.finding import Finding
from rebased.report.paper.verdict import Number


def find_counts() -> Iterator[Finding]:
    """Table 4 and Table 9. They need no records: the models are built without memory, and counted."""
    for name, cells in (("Table 4", TABLE_4), ("Table 9", TABLE_9)):
        numbers = []
        with no_truncation_warnings():
            for cell in cells:
                ours = count_parameters(cell.config())
                what = f"{cell.model}, D = {cell.d_model}, {cell.positions:,} positions"
                same = ours == cell.parameters
                off = float(ours - cell.parameters)
                numbers.append(
                    Number(what, f"{cell.parameters:,}", f"{ours:,}", off, 0, "agrees" if same else "differs")
                )
        yield Finding(BY_NAME[name], "paper", numbers, unit="count", done="computed")


@contextmanager
def no_truncation_warnings() -> Iterator[None]:
    """Silence the presets, which warn about every width that 12 heads do not divide."""
    logger = logging.getLogger("rebased")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
