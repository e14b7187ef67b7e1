"""When a table or figure counts as reproduced."""

from math import nan

import pytest

from rebased.analysis import compare, describe
from rebased.paper.values import printed, read_off
from rebased.paper.verdict import (
    RULES,
    VERDICTS,
    Claim,
    Number,
    Outcome,
    Protocol,
    hold_claim,
    hold_number,
    judge,
)

SEEDS = range(42, 47)


def number(outcome: Outcome) -> Number:
    return Number("cell", "0.5", None if outcome == "not run" else "0.5", 0.0, 5, outcome)


def claim(outcome: Outcome) -> Claim:
    return Claim("a is more than b", None, outcome)


@pytest.mark.parametrize(
    ("numbers", "claims", "protocol", "verdict"),
    [
        (["agrees", "agrees"], ["agrees"], "paper", "reproduced"),
        (["agrees"], [], "paper", "reproduced"),
        (["agrees", "agrees"], ["agrees"], "departs", "partly"),  # departures allow no better verdict
        (["agrees", "not run"], ["agrees"], "paper", "partly"),  # not all was run
        (["agrees"], ["undecided"], "paper", "partly"),
        (["differs"] * 9, ["agrees", "differs"], "paper", "partly"),  # one claim holds
        (["agrees", "differs", "not run"], [], "departs", "partly"),  # half of what was measured
        (["agrees", "differs", "differs"], ["undecided"], "paper", "not reproduced"),
        (["not run"], ["differs"], "departs", "not reproduced"),
        (["not run"], ["undecided", "differs"], "departs", "not reproduced"),
        (["not run"], ["undecided"], "departs", "undecided"),  # nothing speaks against the paper
        ([], ["undecided", "untested", "not run"], "paper", "undecided"),
        (["not run"], ["not run"], "paper", "not run"),
        ([], ["untested", "not run"], "departs", "not run"),  # one seed
        (["untested"], ["untested"], "paper", "not run"),
        (["agrees", "differs", "untested", "untested"], [], "paper", "partly"),  # half of what was tested
        (["agrees"], ["agrees"], "stand-in", "not run"),  # another experiment is not judged
        ([], [], "none", "not run"),
    ],
)
def test_the_rule(numbers: list[Outcome], claims: list[Outcome], protocol: Protocol, verdict: str) -> None:
    assert judge([number(one) for one in numbers], [claim(one) for one in claims], protocol) == verdict


def test_every_verdict_has_its_rule_in_words() -> None:
    assert tuple(RULES) == VERDICTS


def test_a_number_agrees_within_two_standard_errors_and_the_error_of_reading() -> None:
    ours = describe([0.50, 0.52, 0.54, 0.56, 0.58])
    near = hold_number("cell", printed(0.56, 0.03), ours)
    assert (near.paper, near.ours, near.seeds, near.outcome) == ("0.56 ± 0.03", "0.540 ± 0.032", 5, "agrees")
    assert near.difference == pytest.approx(-0.02)
    assert hold_number("cell", printed(0.62, 0.03), ours).outcome == "differs"
    bound = read_off(0.97, at_least=True)
    assert hold_number("cell", bound, describe([0.99, 1.0])).outcome == "agrees"
    assert hold_number("cell", bound, describe([0.9, 0.9])).outcome == "differs"
    assert hold_number("cell", bound, describe([0.99])).outcome == "untested"
    assert hold_number("cell", bound, None) == Number("cell", "≥ 0.97", None, None, 0, "not run")


def test_a_claim_needs_significance_in_the_papers_direction() -> None:
    small = {seed: 0.001 * (seed % 3) for seed in SEEDS}
    ahead = compare({seed: 0.5 + small[seed] for seed in SEEDS}, dict.fromkeys(SEEDS, 0.4))
    assert hold_claim("a", ahead).outcome == "agrees"
    behind = compare(dict.fromkeys(SEEDS, 0.4), {seed: 0.5 + small[seed] for seed in SEEDS})
    assert hold_claim("a", behind).outcome == "differs"
    assert hold_claim("a", ahead._replace(t_holm=0.05)).outcome == "undecided"
    assert hold_claim("a", ahead._replace(t_holm=nan)).outcome == "undecided"  # all differences are equal
    assert hold_claim("a", compare({42: 0.5}, {42: 0.4})).outcome == "untested"
    assert hold_claim("a", None).outcome == "not run"
