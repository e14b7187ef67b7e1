"""The contract of a mixer as a list of checks, for pytest and for commands.

    results = run_mixer_contract("rebased")
    failed = [result for result in results if not result.ok]

Every check builds the mixer as a model does, at a small size on the CPU, with a fixed seed.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import NamedTuple

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


def _list_checks() -> list[Check]:
    floats = (torch.float64, torch.float32)
    lengths = "some sequence lengths do not work"
    leak = "the model is trained on tokens that it must predict"
    spreads = "one bad number hides where it came from"
    gradient = "training does not follow the loss"
    generation = "generation gives other tokens than training"
    checks = [
        Check(f"keeps_shape[T={n}]", lengths, partial(mixer_checks.keeps_shape, length=n), compares=False)
        for n in mixer_checks.LENGTHS
    ]
    checks += [
        Check(
            "output_is_finite",
            "a model cannot be trained with such numbers",
            mixer_checks.output_is_finite,
            compares=False,
        )
    ]
    checks += [
        Check(
            f"keeps_dtype[{_short(dtype)}]",
            "the residual stream changes its dtype",
            partial(mixer_checks.keeps_dtype, dtype=dtype),
        )
        for dtype in floats
    ]
    checks += [Check("computes_in_bfloat16", "it cannot be trained in bfloat16", mixer_checks.computes_in_bfloat16)]
    checks += [
        Check(f"never_looks_ahead[at={n}]", leak, partial(mixer_checks.never_looks_ahead, at=n)) for n in (1, 10, 20)
    ]
    checks += [
        Check(
            f"not_finite_reaches_no_other[{value}]",
            spreads,
            partial(mixer_checks.not_finite_reaches_no_other, value=value),
        )
        for value in (math.nan, math.inf)
    ]
    checks += [
        Check("gradients_never_look_ahead", leak, mixer_checks.gradients_never_look_ahead),
        Check("every_parameter_has_gradient", "a weight is never trained", mixer_checks.every_parameter_has_gradient),
        Check("gradients_match_differences", gradient, mixer_checks.gradients_match_differences),
    ]
    checks += [
        Check(
            f"extend_is_forward_in_pieces[{_pieces(pieces)}, {_short(dtype)}]",
            generation,
            partial(mixer_checks.extend_is_forward_in_pieces, pieces=pieces, dtype=dtype),
        )
        for pieces, dtype in product(SPLITS, floats)
    ]
    checks += [
        Check(
            f"state_has_declared_size[T={n}]",
            "reports show a wrong state size",
            partial(mixer_checks.state_has_declared_size, length=n),
            compares=False,
        )
        for n in (1, 5, 21)
    ]
    checks += [
        Check(
            "given_state_is_not_changed", "a prompt cannot be continued twice", mixer_checks.given_state_is_not_changed
        )
    ]
    checks += [
        Check(f"slots_are_extend[{_short(dtype)}]", generation, partial(mixer_checks.slots_are_extend, dtype=dtype))
        for dtype in floats
    ]
    checks += [
        Check(
            f"shards_are_the_whole[n={count}, {_short(dtype)}]",
            "context parallelism trains another model",
            partial(mixer_checks.shards_are_the_whole, count=count, dtype=dtype),
        )
        for count, dtype in product((1, 3, 7, 21), floats)
    ]
    checks += [
        Check(
            f"documents_are_apart[{_short(dtype)}]",
            "a packed document sees another one",
            partial(mixer_checks.documents_are_apart, dtype=dtype),
        )
        for dtype in floats
    ]
    checks += [
        Check(
            f"prompts_are_apart[{_short(dtype)}]",
            "a prompt that is read together with others sees them",
            partial(mixer_checks.prompts_are_apart, dtype=dtype),
        )
        for dtype in floats
    ]
    checks += [
        Check(
            f"attention_map_is_forward[{_short(dtype)}]",
            "a probe shows another matrix than the model uses",
            partial(mixer_checks.attention_map_is_forward, dtype=dtype),
        )
        for dtype in floats
    ]
    checks += [
        Check("rows_are_apart", "sequences of a batch see each other", mixer_checks.rows_are_apart),
        Check("weights_decide_everything", "results cannot be reproduced", mixer_checks.weights_decide_everything),
        Check(
            "config_matches_constructor",
            "configs cannot name it",
            mixer_checks.config_matches_constructor,
            compares=False,
        ),
        Check(
            "name_stands_for_one_class",
            "a config's name has two meanings",
            mixer_checks.name_stands_for_one_class,
            compares=False,
        ),
        Check(
            "residual_projections_exist",
            "initial weights are not what it declares",
            mixer_checks.residual_projections_exist,
        ),
    ]
    return checks


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _pieces(pieces: list[int]) -> str:
    return "+".join(map(str, pieces)) if len(pieces) < T else "1s"


CHECKS: tuple[Check, ...] = tuple(_list_checks())
"""All checks of the contract, from the simplest on."""
