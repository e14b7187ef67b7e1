"""Tables 4 and 9: parameter counts, computed from the models themselves."""

from collections.abc import Iterator

from rebased.paper.exhibits import BY_NAME
from rebased.paper.finding import Finding
from rebased.paper.parameter_counts import TABLE_4, TABLE_9, count_parameters
from rebased.paper.verdict import Number, Outcome


def find_counts() -> Iterator[Finding]:
    """Table 4 and Table 9. They need no records: the models are built without memory, and counted."""
    for name, cells in (("Table 4", TABLE_4), ("Table 9", TABLE_9)):
        numbers = []
        for cell in cells:
            ours = count_parameters(cell.config())
            what = f"{cell.model}, D = {cell.d_model}, {cell.positions:,} positions"
            outcome: Outcome = "agrees" if ours == cell.parameters else "differs"
            numbers.append(Number(what, f"{cell.parameters:,}", f"{ours:,}", float(ours - cell.parameters), 0, outcome))
        yield Finding(BY_NAME[name], "paper", numbers, unit="count", done="computed")
