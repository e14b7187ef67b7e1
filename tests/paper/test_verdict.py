"""When a claim holds, a number agrees, and a table or figure counts as reproduced."""

from math import isnan

import pytest

from rebased.analysis.spread import describe
from rebased.paper.values import IOU_MARGIN, TABLE_3, printed, read_off
from rebased.paper.verdict import Answer, Claim, Contest, Number, Outcome, Protocol, hold_claims, hold_number, judge

SEEDS = range(42, 47)


def number(outcome: Outcome) -> Number:
    return Number("cell", "0.5", None if outcome == "not run" else "0.5", 0.0, 5, outcome)


def claim(answer: Answer) -> Claim:
    return Claim(Contest("a is more than b"), answer=answer)


@pytest.mark.parametrize(
    ("numbers", "claims", "protocol", "verdict"),
    [
        (["agrees", "agrees"], ["holds"], "paper", "reproduced"),
        (["agrees"], [], "paper", "reproduced"),
        (["agrees", "agrees"], ["holds"], "departs", "partly"),  # departures allow no better verdict
        (["differs"], ["holds"], "paper", "partly"),
        (["differs"] * 9, ["holds", "contradicted"], "paper", "partly"),  # one claim holds
        (["agrees"] * 11, ["undecided"] * 11, "paper", "undecided"),  # no claim holds, whatever numbers say
        (["agrees"] * 11, ["contradicted"], "paper", "not reproduced"),
        ([], ["equal", "undecided", "not run"], "paper", "undecided"),
        ([], ["one seed", "not run"], "departs", "not run"),
        (["agrees"], ["not run"], "paper", "not run"),  # its claims are what counts, and none was tested
        (["by construction"] * 8, [], "paper", "not run"),  # an identity, or an initial value
        (["by construction"] * 8 + ["differs"] * 6 + ["agrees"] * 2, [], "departs", "not reproduced"),
        (["agrees", "differs", "not run"], [], "departs", "in small part"),
        (["agrees", "agrees", "not run", "not run"], [], "departs", "partly"),
        ([], ["holds", *["undecided"] * 9, *["not run"] * 30], "departs", "in small part"),
        ([], ["holds", "holds", "not run", "not run"], "departs", "partly"),
        ([], ["holds", "contradicted", "contradicted", "undecided"], "paper", "not reproduced"),
        ([], ["did not learn"], "paper", "undecided"),
        (["too wide to tell"] * 3, [], "paper", "undecided"),
        (["not run"], ["not run"], "paper", "not run"),
        (["agrees"], ["holds"], "stand-in", "not run"),  # another experiment is not judged
        ([], [], "none", "not run"),
    ],
)
def test_the_rule(numbers: list[Outcome], claims: list[Answer], protocol: Protocol, verdict: str) -> None:
    assert judge([number(one) for one in numbers], [claim(one) for one in claims], protocol) == verdict


def test_a_number_agrees_only_if_its_interval_lies_within_the_margin() -> None:
    ours = describe([0.50, 0.52, 0.54, 0.56, 0.58])
    near = hold_number("cell", printed(0.56, 0.03), ours)
    assert (near.paper, near.ours, near.seeds, near.outcome) == ("0.56 ± 0.03", "0.540 ± 0.032", 5, "agrees")
    assert near.difference == pytest.approx(-0.02)
    assert hold_number("cell", printed(0.70, 0.03), ours).outcome == "differs"
    wide = describe([0.1, 0.9, 0.5, 0.3, 0.7])  # its mean is the paper's
    assert hold_number("cell", printed(0.5, 0.03), wide).outcome == "too wide to tell"
    assert hold_number("cell", printed(0.54, 0.42), ours).outcome == "too wide to tell"  # the paper's spread counts
    assert hold_number("cell", printed(0.5), ours, given=True).outcome == "by construction"
    iou = describe([0.17, 0.175, 0.18])
    assert hold_number("cell", TABLE_3["Based"].iou, iou).outcome == "differs"
    assert TABLE_3["Based"].iou.margin == IOU_MARGIN


def test_a_bound_needs_the_whole_interval_above_it() -> None:
    bound = read_off(0.97, at_least=True)
    assert hold_number("cell", bound, describe([0.99, 0.99, 1.0])).outcome == "agrees"
    assert hold_number("cell", bound, describe([0.9, 0.9])).outcome == "differs"
    assert hold_number("cell", bound, describe([0.90, 0.99, 1.0])).outcome == "too wide to tell"
    assert hold_number("cell", bound, describe([0.99])).outcome == "one seed"
    assert hold_number("cell", bound, None).outcome == "not run"


def test_claims_that_a_planned_test_replaces_do_not_count() -> None:
    claims = [claim("holds"), claim("contradicted")._replace(replaced=True)]
    assert judge([], claims, "paper") == "reproduced"


def test_runs_that_did_not_learn_carry_no_claim() -> None:
    high, low = (dict(zip(SEEDS, values, strict=True)) for values in ([0.9, 0.91, 0.9, 0.92, 0.9], [0.001] * 5))
    (found,) = hold_claims([Contest("a recalls more than b", high, low, learned=False)])
    assert found.answer == "did not learn"
    assert found.difference
    assert found.difference.mean == pytest.approx(0.905)
    assert isnan(found.difference.p)
    assert isnan(found.unpaired)


def answer(ours: list[float], others: list[float], margin: float = 0.1) -> Answer:
    contest = Contest("a", dict(zip(SEEDS, ours, strict=False)), dict(zip(SEEDS, others, strict=False)), margin=margin)
    return hold_claims([contest])[0].answer


def test_a_claim_needs_significance_in_the_papers_direction() -> None:
    high, low = [0.50, 0.51, 0.52, 0.50, 0.51], [0.4] * 5
    assert answer(high, low) == "holds"
    assert answer(low, high) == "contradicted"
    assert answer(high, [0.51, 0.50, 0.51, 0.52, 0.50]) == "equal"
    assert answer(high, [0.1, 0.9, 0.5, 0.2, 0.8]) == "undecided"
    assert answer([0.5], [0.4]) == "one seed"
    assert hold_claims([Contest("a")])[0].answer == "not run"


def test_holm_is_over_the_claims_of_one_table() -> None:
    contest = Contest("a", dict(zip(SEEDS, [0.5, 0.6, 0.5, 0.7, 0.6], strict=True)), dict.fromkeys(SEEDS, 0.45))
    alone, *_ = hold_claims([contest])
    together = hold_claims([contest] * 10)
    assert alone.answer == "holds"
    assert alone.found
    assert together[0].found
    assert together[0].found.t_holm == pytest.approx(10 * alone.found.t_p)
    assert together[0].answer == "undecided"
    assert together[0].unpaired == pytest.approx(10 * alone.unpaired)  # p without pairs is corrected too
    dead = Contest("b", dict.fromkeys(SEEDS, 0.9), dict.fromkeys(SEEDS, 0.001), learned=False)
    assert hold_claims([contest, dead])[0].found == hold_claims([contest, dead._replace(learned=True)])[0].found
