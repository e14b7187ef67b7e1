"""The contract of a mixer as a list of checks, for pytest and for commands.

    results = run_mixer_contract("rebased")
    failed = [result for result in results if not result.ok]

Every check builds the mixer as a model does, at a small size on the CPU, with a fixed seed.
"""

from collections.abc import Iterator
from functools import partial

from rebased.evaluate.checks import CheckResult, NotApplicable, run_check
from rebased.evaluate.mixer_checks import CHECKS, Check
from rebased.mixers import MixerFailed, mixer_class


def run_mixer_contract(name: str) -> Iterator[CheckResult]:
    """The result of each check for the mixer registered under this name, in the order of CHECKS, one by one."""
    mixer_class(name)  # an unknown name is one error, at once
    failed_in: dict[str, str] = {}  # the check that an error of the mixer was first seen in

    def run(check: Check) -> None:
        try:
            check.run(name)
        except MixerFailed as error:
            first = failed_in.setdefault(str(error), check.name)
            if first != check.name:
                raise NotApplicable(f"the mixer fails as in {first}") from error
            raise

    return (run_check(check.name, partial(run, check), f" ({check.why})") for check in CHECKS)
