"""What a contract suite answers: one result per check."""

from collections.abc import Callable
from typing import Literal, NamedTuple

from torch import Tensor

Outcome = Literal["passed", "failed", "skipped"]
MARKS: dict[Outcome, str] = {"passed": "✓", "failed": "✗", "skipped": "-"}


class NotApplicable(Exception):
    """A check is about something that the mixer or task does not have: an optional method, or numbers that can be
    compared. The message names it."""


def require(condition: bool | Tensor, message: str) -> None:
    """Raise AssertionError with the message unless the condition holds."""
    if not condition:
        raise AssertionError(message)


class CheckResult(NamedTuple):
    """The outcome of one named check."""

    name: str
    outcome: Outcome
    message: str = ""  # of a failed check what was expected and what was found; of a skipped one the reason

    @property
    def ok(self) -> bool:
        """True unless the check failed."""
        return self.outcome != "failed"

    def __str__(self) -> str:
        """One line: a mark, the name, and the message if there is one."""
        said = ("skipped", self.message) if self.outcome == "skipped" else (self.message,)
        return " ".join(f"{MARKS[self.outcome]} {': '.join(filter(None, (self.name, *said)))}".split())


def run_check(name: str, call: Callable[[], None], why: str = "") -> CheckResult:
    """The outcome of a call: passed, skipped if it raises NotApplicable, failed with the message of all else."""
    try:
        call()
    except NotApplicable as reason:
        return CheckResult(name, "skipped", str(reason))
    except Exception as error:  # the user's code may raise anything
        kind = "" if isinstance(error, AssertionError | ValueError) else f"{type(error).__name__}: "
        return CheckResult(name, "failed", f"{kind}{error}{why}")
    return CheckResult(name, "passed")
