"""Claims of the paper that planned tests answer again, on runs of their own."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from rebased.paper.finding import Finding
from rebased.paper.mqar import papers_effect
from rebased.paper.planned import JudgedPlan
from rebased.paper.values import Place
from rebased.paper.verdict import HERE, Answer, Claim, Contest, Difference
from rebased.report.lm.models import PARTS


class Answered(NamedTuple):
    """A plan that answers claims of a table again, on other runs."""

    table: str
    where: str  # what the runs are, before the name of a test
    places: Sequence[Place] = ()  # of the paper's values; none: those of the earlier claim
    softmax: str = ""  # what limits the answers about attention
    also: str = ""  # the name of a shown test that limits it


DECIDED: dict[str, Answer] = {"holds": "holds", "contradicted": "contradicted", "equal": "equal"}
PLANS = {
    "table1-new-seeds": Answered("Table 1", "T = 256", [Place("ReBased", 256, 32, d_model) for d_model in (24, 32)]),
    "table1-t2048": Answered("Table 1", "T = 2,048", [Place("ReBased", 2048, 32, 32)]),
    "enwik8-one-pass": Answered(
        "Table 2",
        "one pass",
        softmax="but attention lacks the short convolution that Based and ReBased have here, Based gains as much, and "
        "all have one rate",
    ),
    "table3-fair": Answered("Table 3", "trained alike", also="12 heads: mean over heads"),
}


def with_plans(finding: Finding, planned: Mapping[str, JudgedPlan]) -> Finding:
    """The finding with the claims that planned tests answer again, in the words of its protocol."""
    claims = finding.claims
    for name, about in PLANS.items():
        if about.table == finding.name and name in planned:
            claims = answer_again(claims, about, planned[name])
    if finding.protocol == "stand-in":
        claims = [claim._replace(answer=HERE.get(claim.answer, claim.answer)) for claim in claims]
    return replace(finding, claims=claims)


def answer_again(claims: Sequence[Claim], about: Answered, plan: JudgedPlan) -> list[Claim]:
    """The claims of a table with those that the plan's tests have answered: before the earlier ones of the same two
    models, which no longer count."""
    found = list(claims)
    for outcome in plan.outcomes:
        test, effect = outcome.test, outcome.effect
        if outcome.is_shown or effect is None:
            continue
        models, part = (test.a["model"], test.b["model"]), PARTS.get(test.value.removeprefix("loss."))
        pair = models[::-1] if part else models  # the greater loss comes first in a test
        begin = f"{part} tokens" if part else f"{about.where}:" if about.places else ""
        earlier = [
            n
            for n, claim in enumerate(found)
            if claim.contest.pair == pair and claim.what.startswith(begin)
            if claim.planned is None and claim.answer != "one seed"
        ]
        first = found[earlier[0]].contest
        paper = papers_effect(about.places, pair[1]) if about.places else first.paper
        head, _, statement = test.name.rpartition(": ")
        where = ", ".join(filter(None, (about.where, part and f"{part} tokens", head)))
        what = f"{where}: {statement.removesuffix(f', {part} tokens')}"
        contest = Contest(what, paper=paper, unit=first.unit, pair=pair)
        numbers = Difference(effect.difference, *outcome.interval, outcome.p)
        answer = DECIDED.get(outcome.answer, "undecided")
        note = about.softmax if "Attention" in pair else outcome.fragile
        claim = Claim(contest, answer=answer, planned=numbers, mark=plan.mark, note=note)
        for n in earlier:
            found[n] = found[n]._replace(replaced=True, mark="earlier")
        found.insert(earlier[0], claim)
    return found
