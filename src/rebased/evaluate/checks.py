"""What one check of a contract suite found."""

from typing import NamedTuple


class CheckResult(NamedTuple):
    """The result of one check. A check that passed may have a message too, for example why it did not apply."""

    name: str
    ok: bool
    message: str = ""  # if not ok: what was found and what was expected
