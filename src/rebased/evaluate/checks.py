"""What a contract suite answers: one result per check."""

from typing import NamedTuple


class CheckResult(NamedTuple):
    """The outcome of one named check. The message says what was expected and what was found; empty where it is ok."""

    name: str
    ok: bool
    message: str
