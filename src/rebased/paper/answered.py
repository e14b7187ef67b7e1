"""Claims of the paper that planned tests answer too, on runs of their own."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from rebased.paper.finding import Finding
from rebased.paper.mqar import papers_effect
from rebased.paper.plan_file import PlannedTest
from rebased.paper.planned import JudgedPlan
from rebased.paper.values import Place
from rebased.paper.verdict import HERE, Answer, Claim, Contest, Difference
from rebased.report.lm.models import PARTS


class Answered(NamedTuple):
    """A plan whose tests answer claims of a table, on other runs."""

    table: str
    where: str = ""  # what distinguishes the runs, in words; empty: each test says it at the end of its name
    places: Sequence[Place] = ()  # of the paper's values; none: those of the earlier claim
    replaces: bool = False  # its text says that its result replaces the earlier one


DECIDED: dict[str, Answer] = {"holds": "holds", "contradicted": "contradicted", "equal": "equal"}
UNITS = {"held_out": "accuracy", "loss": "nats", "iou": "IoU"}  # of claims, by the value that a test compares
OTHER_QUANTITIES = ("iou.live", "iou.best")  # the claims of Table 3 are about the mean over heads
PLANS = {
    "table1-new-seeds": Answered("Table 1", "T = 256", [Place("ReBased", 256, 32, d) for d in (24, 32)], replaces=True),
    "table1-t2048": Answered("Table 1", "T = 2,048", [Place("ReBased", 2048, 32, 32)]),
    "figure1-t512": Answered("Figure 1", "T = 512", [Place("ReBased", 512, 128, 64)]),
    "figure7-t256": Answered("Figure 7"),
    "enwik8-one-pass": Answered("Table 2", "one pass"),
    "enwik8-dropout": Answered("Table 2", "dropout"),
    "mini-pile": Answered("Table 2", "mini-pile"),
    "mini-pile/pass": Answered("Table 2", "mini-pile-pass"),
    "mini-pile/long": Answered("Table 2", "mini-pile-long"),
    "table3-fair": Answered("Table 3", "live heads"),
}
"""In the order in which their answers are shown."""


def with_plans(finding: Finding, planned: Mapping[str, JudgedPlan]) -> Finding:
    """The finding with the claims that planned tests answer too, in the words of its protocol."""
    claims = finding.claims
    for name, about in PLANS.items():
        if about.table == finding.name and name in planned:
            claims = answer_again(claims, about, planned[name])
    if finding.protocol == "stand-in":
        claims = [claim._replace(answer=HERE.get(claim.answer, claim.answer)) for claim in claims]
    return replace(finding, claims=claims)


def answer_again(claims: Sequence[Claim], about: Answered, plan: JudgedPlan) -> list[Claim]:
    """The claims of a table, and before them those about the same two models that the plan's tests answer.

    Both count, unless the plan says that it replaces the earlier result and compares the same quantity.
    """
    found = list(claims)
    for outcome in plan.outcomes:
        test, effect = outcome.test, outcome.effect
        earlier = same_claims(found, about, test)
        if outcome.is_shown or effect is None or not earlier:
            continue
        first = found[earlier[0]].contest
        head, _, statement = test.name.rpartition(": ")
        part = PARTS.get(test.value.removeprefix("loss."))
        own = where_of(about, test)
        where = ", ".join(filter(None, (part and f"{part} tokens", own, head)))
        what = f"{where}: {statement.removesuffix(f', {part} tokens').removesuffix(f', {own}')}"
        paper = papers_effect(about.places, first.pair[1]) if about.places else first.paper
        widths = [place.d_model for place in about.places]
        contest = Contest(what, paper=paper, unit=first.unit, pair=first.pair, widths=widths)
        numbers = Difference(effect.difference, *outcome.interval, outcome.p)
        answer = DECIDED.get(outcome.answer, "undecided")
        for n in earlier:
            replaced = found[n].difference is None or (about.replaces and test.value not in OTHER_QUANTITIES)
            found[n] = found[n]._replace(replaced=replaced, mark="earlier" if replaced else "")
        found.insert(earlier[0], Claim(contest, answer=answer, planned=numbers, mark=plan.mark, note=outcome.remarks))
    return found


def same_claims(claims: Sequence[Claim], about: Answered, test: PlannedTest) -> list[int]:
    """Where the claims stand that runs of another experiment make about the models and the value of a test; of its
    length and of its tokens, if it has such."""
    kind, _, part = test.value.partition(".")
    begin = {"held_out": f"{where_of(about, test)}:", "loss": f"{PARTS.get(part)} tokens"}.get(kind, "")
    pair = test.a["model"], test.b.get("model")
    return [
        n
        for n, claim in enumerate(claims)
        if claim.contest.pair == (pair[::-1] if kind == "loss" else pair)  # the greater loss comes first in a test
        if claim.contest.unit == UNITS.get(kind) and claim.what.startswith(begin) and claim.planned is None
    ]


def where_of(about: Answered, test: PlannedTest) -> str:
    """What distinguishes the runs of a test: as its plan says, or else the end of its name, such as T = 256."""
    return about.where or test.name.rpartition(", ")[2]
