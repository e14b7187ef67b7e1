"""When a table or figure counts as reproduced: the rules, in words for the page and as one function."""

from collections.abc import Sequence
from math import isnan
from typing import Literal, NamedTuple, get_args

from rebased.analysis import Comparison, Spread
from rebased.analysis.paired import SIGNIFICANT
from rebased.report.reference_values import ReferenceValue, agrees

Verdict = Literal["reproduced", "partly", "undecided", "not reproduced", "not run"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
Outcome = Literal["agrees", "differs", "undecided", "untested", "not run"]
Protocol = Literal["paper", "departs", "stand-in", "none"]
"""How the records that were used were made: by the paper's protocol; in the paper's experiment, but with departures
from its protocol; in another experiment (another text, task or size), which stands in for it; or there are none."""

RULES: dict[Verdict, str] = {
    "reproduced": "All its numbers were measured by the paper's protocol and agree, and all its claims hold.",
    "partly": "The paper's own experiment was run, at least in part, and at least one claim holds or at least half of "
    "the measured numbers agree. Departures from the paper's protocol (fewer epochs, rates or seeds, half "
    "precision) allow no better verdict.",
    "undecided": "The paper's own experiment was run, at least in part. No measured number differs and no claim is "
    "contradicted, but no claim holds either: too few seeds, or too small a difference.",
    "not reproduced": "The paper's own experiment was run, at least in part, and most of the measured numbers differ, "
    "or claims are contradicted and none holds. With departures from the protocol this says little about the paper.",
    "not run": "There is no record of the paper's own experiment, or only one seed, which can be put to no test. What "
    "was measured in its place, on another text or at another size, is shown as a stand-in and not judged.",
}
MEANINGS = (
    "A number agrees if the means differ by at most two standard errors of both plus the error of reading the paper's "
    "value (0.02 in a picture, half of the last digit in a table). Wide spreads agree with much; look at the "
    "difference too. Where the paper shows no spread, ours stands for it. One seed alone is untested. A parameter "
    "count must be equal.",
    "A claim holds if our difference has the paper's sign and is significant: paired t test over the seeds that both "
    f"models have, p below {SIGNIFICANT:g} after Holm's correction over the claims of that table or figure. It is "
    "contradicted if the sign is the other one and significant. One seed alone is untested. All else is undecided.",
    "Where there are several records of one table or figure, those are used that depart least from the paper's "
    "protocol; those with one seed come last. They are never mixed in one table. The others are shown below it, and no "
    "verdict rests on them.",
)


class Number(NamedTuple):
    """A number of the paper beside ours."""

    what: str
    paper: str
    ours: str | None  # None: not measured
    difference: float | None  # ours - paper's; None if that means nothing
    seeds: int
    outcome: Outcome


class Claim(NamedTuple):
    """A statement of the paper that one value is greater than another, and the paired test of ours."""

    what: str
    found: Comparison | None  # None: not measured. Positive differences are the paper's direction
    outcome: Outcome


def judge(numbers: Sequence[Number], claims: Sequence[Claim], protocol: Protocol) -> Verdict:
    """The verdict on a table or figure. RULES says the same in words."""
    outcomes = [*(number.outcome for number in numbers), *(claim.outcome for claim in claims)]
    if protocol in ("stand-in", "none") or all(outcome in ("not run", "untested") for outcome in outcomes):
        return "not run"
    if protocol == "paper" and all(outcome == "agrees" for outcome in outcomes):
        return "reproduced"
    measured = [number for number in numbers if number.outcome not in ("not run", "untested")]
    agreeing = sum(number.outcome == "agrees" for number in measured)
    if any(claim.outcome == "agrees" for claim in claims) or (measured and 2 * agreeing >= len(measured)):
        return "partly"
    return "not reproduced" if "differs" in outcomes else "undecided"


def hold_number(what: str, paper: ReferenceValue, ours: Spread | None, digits: int = 3) -> Number:
    """A mean of the paper beside our mean over seeds; None if it was not measured. One seed has no standard error."""
    shown = f"{'≥ ' if paper.at_least else ''}{paper.mean:.{2 if paper.error > 0.001 else 3}f}"
    shown += f" ± {paper.sd:.2f}" if paper.sd is not None else ""
    if ours is None:
        return Number(what, shown, None, None, 0, "not run")
    text = f"{ours.mean:.{digits}f}" + ("" if isnan(ours.sd) else f" ± {ours.sd:.{digits}f}")
    outcome: Outcome = "untested" if ours.n < 2 else "agrees" if agrees(ours, paper) else "differs"
    return Number(what, shown, text, ours.mean - paper.mean, ours.n, outcome)


def hold_claim(what: str, found: Comparison | None) -> Claim:
    """A claim beside the comparison of (what the paper finds greater) - (the other). None if it was not measured."""
    if found is None:
        return Claim(what, None, "not run")
    if found.difference.n < 2:
        return Claim(what, found, "untested")
    if isnan(found.t_holm) or found.t_holm >= SIGNIFICANT:
        return Claim(what, found, "undecided")
    return Claim(what, found, "agrees" if found.difference.mean > 0 else "differs")
