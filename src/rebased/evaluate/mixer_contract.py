"""The contract of a mixer as a list of checks, for pytest and for commands.

    results = run_mixer_contract("rebased")
    failed = [result for result in results if not result.ok]

Every check builds the mixer as a model does, at a small size on the CPU, with a fixed seed.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch

from rebased.evaluate import mixer_checks
from rebased.evaluate.checks import CheckResult, NotApplicable
from rebased.evaluate.mixer_cases import T, gives_finite
from rebased.mixers import MixerFailed, mixer_class

SPLITS = ([21], [1] * 21, [20, 1], [1, 20], [8, 5, 1, 7], [3, 16, 2])


class Check(NamedTuple):
    """One check of the contract."""

    name: str
    why: str  # what goes wrong with a mixer that fails
    function: Callable[[str], None]  # takes the name of a registered mixer; raises if it fails
    compares: bool = True  # whether it compares numbers, which says nothing where the output is not finite

    def run(self, mixer: str) -> None:
        """Run the check for a registered mixer. Raises AssertionError or ValueError if it fails, NotApplicable to skip.

        The seed is fixed. Random number streams are left as they are.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            try:
                self.function(mixer)
            except AssertionError:
                if self.compares and not gives_finite(mixer):
                    raise NotApplicable("the output is not finite, so its numbers cannot be compared") from None
                raise


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


def _checks(
    run: Callable[..., None], why: str, cases: Mapping[str, dict[str, Any]] | None = None, *, compares: bool = True
) -> list[Check]:
    """The checks of one function: one per case, {label in the check's name: arguments}, or a single one."""
    if cases is None:
        return [Check(run.__name__, why, run, compares=compares)]
    return [
        Check(f"{run.__name__}[{label}]", why, partial(run, **arguments), compares=compares)
        for label, arguments in cases.items()
    ]


def _list_checks() -> list[Check]:
    of = mixer_checks
    floats = {"float64": {"dtype": torch.float64}, "float32": {"dtype": torch.float32}}
    pieces = {
        f"{'+'.join(map(str, split)) if len(split) < T else '1s'}, {name}": {"pieces": split, **dtype}
        for split, (name, dtype) in product(SPLITS, floats.items())
    }
    leak = "the model is trained on tokens that it must predict"
    generation = "generation gives other tokens than training"
    lengths = {f"T={n}": {"length": n} for n in of.LENGTHS}
    return [
        *_checks(of.keeps_shape, "some sequence lengths do not work", lengths, compares=False),
        *_checks(of.output_is_finite, "a model cannot be trained with such numbers", compares=False),
        *_checks(of.keeps_dtype, "the residual stream changes its dtype", floats),
        *_checks(of.computes_in_bfloat16, "it cannot be trained in bfloat16"),
        *_checks(of.never_looks_ahead, leak, {f"at={n}": {"at": n} for n in (1, 10, 20)}),
        *_checks(
            of.not_finite_reaches_no_other,
            "one bad number hides where it came from",
            {f"{value}": {"value": value} for value in (math.nan, math.inf)},
        ),
        *_checks(of.gradients_never_look_ahead, leak),
        *_checks(of.every_parameter_has_gradient, "a weight is never trained"),
        *_checks(of.gradients_match_differences, "training does not follow the loss"),
        *_checks(of.extend_is_forward_in_pieces, generation, pieces),
        *_checks(
            of.state_has_declared_size,
            "reports show a wrong state size",
            {f"T={n}": {"length": n} for n in (1, 5, 21)},
            compares=False,
        ),
        *_checks(of.given_state_is_not_changed, "a prompt cannot be continued twice"),
        *_checks(of.slots_are_extend, generation, floats),
        *_checks(of.documents_are_apart, "a packed document sees another one", floats),
        *_checks(of.prompts_are_apart, "a prompt that is read together with others sees them", floats),
        *_checks(of.attention_map_is_forward, "a probe shows another matrix than the model uses", floats),
        *_checks(of.rows_are_apart, "sequences of a batch see each other"),
        *_checks(of.weights_decide_everything, "results cannot be reproduced"),
        *_checks(of.config_matches_constructor, "configs cannot name it", compares=False),
        *_checks(of.name_stands_for_one_class, "a config's name has two meanings", compares=False),
        *_checks(of.residual_projections_exist, "initial weights are not what it declares"),
    ]


CHECKS: tuple[Check, ...] = tuple(_list_checks())
"""All checks of the contract, from the simplest on."""
