"""The contract of a mixer as a list of checks, for pytest and for commands.

    results = run_mixer_contract("rebased")
    failed = [result for result in results if not result.ok]

Every check builds the mixer as a model does, at a small size on the CPU, with a fixed seed.
"""

from collections.abc import Iterator

from rebased.evaluate.checks import CheckResult, NotApplicable
from rebased.evaluate.mixer_checks import CHECKS
from rebased.mixers import MixerFailed, mixer_class


def run_mixer_contract(name: str) -> Iterator[CheckResult]:
    """The result of each check for the mixer registered under this name, in the order of CHECKS, one by one."""
    mixer_class(name)  # an unknown name is one error, at once
    return _results(name)


def _results(name: str) -> Iterator[CheckResult]:
    failed_in: dict[str, str] = {}  # the check that an error of the mixer was first seen in
    for check in CHECKS:
        try:
            check.run(name)
            yield CheckResult(check.name, "passed")
        except NotApplicable as reason:
            yield CheckResult(check.name, "skipped", str(reason))
        except Exception as error:
            first = failed_in.setdefault(str(error), check.name)
            if isinstance(error, MixerFailed) and first != check.name:
                yield CheckResult(check.name, "skipped", f"the mixer fails as in {first}")
                continue
            kind = "" if isinstance(error, AssertionError | ValueError) else f"{type(error).__name__}: "
            yield CheckResult(check.name, "failed", f"{kind}{error} ({check.why})")
