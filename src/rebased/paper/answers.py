"""The top of the page: five sentences that answer, and one plot of all effects with their intervals."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import isnan

from rebased.analysis.paired import equals
from rebased.paper.answered import PLANS
from rebased.paper.contents import EXPERIMENTS
from rebased.paper.finding import Finding, tally
from rebased.paper.planned import JudgedPlan
from rebased.paper.values import KERNEL_ORDER, TABLE_1, Place
from rebased.paper.verdict import TESTED, Claim
from rebased.report.drawing import SERIES, Interval, Panels, draw_intervals, draw_panels

FIRST = ("Table 1", "Figure 1", "Table 2", "Table 3")  # tables and figures in the order of their importance
READ = {"holds": "yes", "holds here": "yes", "contradicted": "no", "opposite here": "no", "one seed": "untested"}
UNITS = {"accuracy": "Accuracy on MQAR", "nats": "Loss on text, nats per token", "IoU": "Attention on answers, IoU"}
EARLIER = SERIES[5]  # the colour of runs that a planned test has replaced
SOFTMAX = ("Attention", "ConvAttention")


def main_claims(findings: Mapping[str, Finding]) -> list[tuple[str, Claim]]:
    """Pairs of a table or figure and a measured claim, the most important first."""
    return [(name, claim) for name in FIRST for claim in tested_or_all(findings[name].claims)]


def tested_or_all(claims: Iterable[Claim]) -> list[Claim]:
    """The measured claims without those that have one seed, unless all of them have."""
    measured = [claim for claim in claims if claim.difference]
    return [claim for claim in measured if claim.answer != "one seed"] or measured


def counted_once(findings: Mapping[str, Finding]) -> list[Claim]:
    """All claims that count. One that two figures of an experiment make is the same claim, from the same runs."""
    found: dict[tuple[str, str], Claim] = {}
    for experiment in EXPERIMENTS:
        for claim in (claim for item in experiment.items for claim in findings[item.name].claims):
            if not claim.replaced:
                found.setdefault((experiment.key, claim.what), claim)
    return list(found.values())


def sentences(findings: Mapping[str, Finding], planned: Mapping[str, JudgedPlan]) -> Iterator[str]:
    """Does ReBased beat Based? Attention? Where is it undecided?"""

    def answer(table: str, other: str, of: str = "") -> str:
        claims = [claim for claim in findings[table].claims if of in claim.what and not claim.replaced]
        claims = tested_or_all(claim for claim in claims if claim.contest.pair == ("ReBased", other))
        said = "; ".join(map(in_short, claims)) or "no run here says so"
        return said[0].upper() + said[1:]

    text = findings["Table 2"]
    where = f" ({text.departures[0]})" if text.protocol == "stand-in" else ""
    yield f"Does ReBased recall more than Based? {answer('Table 1', 'Based')}."
    yield f"Does it model text better than Based{where}? {answer('Table 2', 'Based', 'all tokens')}."
    overfit = f"; {text.headline}" if text.headline else ""
    yield f"Better than attention? {answer('Table 2', 'Attention', 'all tokens')}{overfit}."
    looks = findings["Table 3"]
    shown = planned["table3-fair"].outcomes if any(claim.planned for claim in looks.claims) else []
    limit = next((found for found in shown if found.test.name == PLANS["table3-fair"].also), None)
    but = f"but {limit.test.name.replace(': ', ', ')}: {limit.words}, {limit.answer}" if limit else looks.headline
    yield f"Does it look at the answers more than Based? {answer('Table 3', 'Based')}{but and '; '}{but}."
    yield undecided(findings)


def in_short(claim: Claim) -> str:
    """'undecided (T = 256): +0.098 of accuracy (95 % interval +0.019 to +0.178; paper +0.060; p = 0.13)'"""
    assert claim.difference is not None
    mean, low, high, p = claim.difference
    paper, where = claim.contest.paper, claim.what.partition(":")[0]
    unit = f" {'of accuracy' if claim.contest.unit == 'accuracy' else claim.contest.unit}"
    beside = [
        "" if isnan(low) else f"95 % interval {low:+.3f} to {high:+.3f}",
        f"paper {paper.difference:+.3f}" if paper else "",
        "" if isnan(p) else f"p {equals(p)}",
        "" if isnan(claim.selected) else f"{equals(claim.selected)[2:]} if rates are chosen on the tested seeds",
        claim.mark,
        "one seed" if claim.answer == "one seed" else "",
        claim.note,
    ]
    said = "; ".join(filter(None, beside))
    return f"{READ.get(claim.answer, claim.answer)} ({where}): {mean:+.3f}{unit}" + (f" ({said})" if said else "")


def undecided(findings: Mapping[str, Finding]) -> str:
    """How many claims are tested, and which runs are missing where the paper's lead is largest."""
    claims = counted_once(findings)
    answers = [claim.answer for claim in claims]
    tested, said = sum(answer in TESTED for answer in answers), tally(answers, TESTED)
    softmax = sum(claim.answer == "holds" and claim.contest.pair[0] in SOFTMAX for claim in claims)
    of_these = f" ({softmax} of those that hold put attention before a linear model)" if softmax else ""
    one, other = (TABLE_1[Place(model, 2048, 32, 32)].mean for model in ("ReBased", "Based"))
    long = any(claim.difference and "2,048" in claim.what for claim in findings["Table 1"].claims)
    missing = "" if long else f"; T = 2,048, where the paper's lead is largest ({one:g} against {other:g}), has no run"
    return f"Where is it undecided? Of {len(answers)} claims {tested} are tested: {said or 'none'}{of_these}{missing}."


def forest(claims: Sequence[tuple[str, Claim]]) -> Panels | None:
    """One panel per unit, one row per claim: our difference with its 95 % interval, the paper's above it."""

    groups: dict[str, list[Interval]] = {}
    for name, claim in claims:
        if claim.difference and not isnan(claim.difference.low) and is_between_rivals(claim):
            series, paper = ("ours, earlier", EARLIER) if claim.replaced else ("ours", SERIES[0]), claim.contest.paper
            other = (paper.difference, *paper.interval()) if paper else None
            row = Interval(short(name, claim), *claim.difference[:3], in_short(claim), *series, other)
            groups.setdefault(UNITS[claim.contest.unit], []).append(row)
    panels = {heading: draw_intervals(rows, "paper") for heading, rows in groups.items()}
    title = "Differences with 95 % intervals, ours beside the paper's"
    return draw_panels(panels, "effects", title, 2) if panels else None


def is_between_rivals(claim: Claim) -> bool:
    """Whether a claim compares ReBased with another kernel, or losses on text. Other effects are near 1."""
    one, other = claim.contest.pair
    return claim.contest.unit == "nats" or (one == "ReBased" and other in KERNEL_ORDER)


def short(name: str, claim: Claim) -> str:
    """'ReBased − Based, T = 256'; of a figure with its name, because a table may have the same length."""
    where = claim.what.partition(": ")[0].partition(" with ")[0]
    one, two = reversed(claim.contest.pair) if claim.contest.unit == "nats" else claim.contest.pair
    earlier = ", earlier" if claim.replaced else ""
    return f"{one} − {two}, {where}{earlier}" + (f", {name}" if name.startswith("Figure") else "")
