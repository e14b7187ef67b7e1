"""When a claim holds, when a number agrees, and when a table or figure counts as reproduced."""

from collections.abc import Iterable, Mapping, Sequence
from math import isnan, nan, sqrt
from typing import Literal, NamedTuple, get_args

from rebased.analysis.paired import SIGNIFICANT, Comparison, compare_all
from rebased.analysis.spread import Spread
from rebased.analysis.unpaired import Effect, effect
from rebased.report.reference_values import MARGIN, Agreement, ReferenceValue, agreement, difference_from

Verdict = Literal["reproduced", "partly", "undecided", "not reproduced", "not run"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
Answer = Literal["holds", "contradicted", "equal", "undecided", "one seed", "not run"]
Outcome = Agreement | Literal["by construction", "one seed", "not run"]
TESTED: tuple[Answer, ...] = ("holds", "contradicted", "equal", "undecided")
Protocol = Literal["paper", "departs", "stand-in", "none"]
"""How the records that were used were made: by the paper's protocol; in the paper's experiment, but with departures
from its protocol; in another experiment (another text, task or size), which stands in for it; or there are none."""

RULES = (
    "A claim holds if our difference has the paper's sign and is significant: paired t test over seeds, p below "
    f"{SIGNIFICANT:g} after Holm's correction over the claims of its table or figure. With the other sign it is "
    "contradicted. It is equal if the difference is smaller than a margin by two one-sided tests. All else is "
    "undecided.",
    f"The margin is {MARGIN:g} for accuracies, 0.016 for IoU and 0.01 nats for losses; the last two are as large as "
    "the paper's differences.",
    "The learning rate of a seed is chosen on the other seeds, and accuracy is measured on a held-out split.",
    "The paired test was planned. Runs of one seed part early, so pairing may gain nothing; the test without it is "
    "shown beside.",
    "A number agrees if the 90 % interval of its difference from the paper's lies within the margin, and differs if "
    "the 95 % interval excludes 0. Else the interval is too wide to tell.",
    "A verdict rests on claims; on numbers only where a table or figure makes no claim. What follows from a definition "
    "or is an initial value does not count. Reproduced: every claim holds, by the paper's protocol. Partly: at least "
    "one holds. Not reproduced: some are contradicted and none holds. Undecided: neither.",
)


class Contest(NamedTuple):
    """A statement of the paper that one value is greater than another, and our values by seed; None: not measured."""

    what: str
    ours: Mapping[int, float] | None  # of what should be greater
    others: Mapping[int, float] | None
    selected: tuple[Mapping[int, float], Mapping[int, float]] | None = None  # at rates chosen on the tested seeds
    paper: Effect | None = None  # the paper's difference
    margin: float = MARGIN
    unit: str = "accuracy"


class Claim(NamedTuple):
    """A contest and its tests."""

    contest: Contest
    found: Comparison | None  # paired by seed, corrected over the claims of its table; None: not measured
    unpaired: float  # p without pairs, not corrected
    selected: float  # Holm p if rates are chosen on the tested seeds; nan if nothing is chosen
    answer: Answer

    @property
    def what(self) -> str:
        """The statement."""
        return self.contest.what


class Number(NamedTuple):
    """A number of the paper beside ours."""

    what: str
    paper: str
    ours: str | None  # None: not measured
    difference: float | None  # ours - paper's; None if that means nothing
    width: float  # of the 90 % interval of the difference; nan without one
    seeds: int
    outcome: Outcome


def judge(numbers: Sequence[Number], claims: Sequence[Claim], protocol: Protocol) -> Verdict:
    """The verdict on a table or figure, as RULES says it in words."""
    if protocol in ("stand-in", "none"):
        return "not run"
    outcomes = [number.outcome for number in numbers if number.outcome != "by construction"]
    measured = [outcome for outcome in outcomes if outcome not in ("one seed", "not run")]
    answers = [claim.answer for claim in claims]
    if claims:
        if not any(answer in TESTED for answer in answers):
            return "not run"
        if protocol == "paper" and set(answers) == {"holds"} and "differs" not in outcomes:
            return "reproduced"
        return "partly" if "holds" in answers else "not reproduced" if "contradicted" in answers else "undecided"
    if not measured:
        return "not run"
    agreeing, differing = measured.count("agrees"), measured.count("differs")
    if protocol == "paper" and agreeing == len(outcomes):
        return "reproduced"
    if 2 * agreeing >= len(measured):
        return "partly"
    return "not reproduced" if 2 * differing > len(measured) else "undecided"


def hold_number(what: str, paper: ReferenceValue, ours: Spread | None, *, given: bool = False) -> Number:
    """A mean of the paper beside our mean over seeds; None if it was not measured. `given` is a number that follows
    from a definition, or that training begins with."""
    shown = f"{'≥ ' if paper.at_least else ''}{paper.mean:.{2 if paper.error > 0.001 else 3}f}"
    shown += f" ± {paper.sd:.2f}" if paper.sd is not None else ""
    if ours is None:
        return Number(what, shown, None, None, nan, 0, "not run")
    text = f"{ours.mean:.3f}" + ("" if isnan(ours.sd) else f" ± {ours.sd:.3f}")
    outcome: Outcome = "by construction" if given else "one seed" if ours.n < 2 else agreement(ours, paper)
    width = nan if ours.n < 2 else difference_from(ours, paper).width
    return Number(what, shown, text, ours.mean - paper.mean, width, ours.n, outcome)


def hold_claims(contests: Iterable[Contest]) -> list[Claim]:
    """All claims of a table or figure, tested together: Holm's correction is over those that were measured."""
    every = list(contests)
    tested = [one for one in every if one.ours and one.others and one.ours.keys() & one.others.keys()]
    found = iter(compare_all([(one.ours or {}, one.others or {}) for one in tested]))
    leaky = iter(compare_all([one.selected or (one.ours or {}, one.others or {}) for one in tested]))
    return [
        hold_claim(one, next(found), next(leaky)) if one in tested else Claim(one, None, nan, nan, "not run")
        for one in every
    ]


def hold_claim(contest: Contest, found: Comparison, leaky: Comparison) -> Claim:
    """A claim beside its comparison of (what the paper finds greater) - (the other)."""
    spread, answer = found.difference, "undecided"
    apart = effect({0: list((contest.ours or {}).values())}, {0: list((contest.others or {}).values())})
    if spread.n < 2:
        answer = "one seed"
    elif found.t_holm < SIGNIFICANT:
        answer = "holds" if spread.mean > 0 else "contradicted"
    elif Effect(spread.mean, spread.sd / sqrt(spread.n), spread.n - 1, spread.n, spread.n).is_within(contest.margin):
        answer = "equal"
    return Claim(contest, found, apart.p, leaky.t_holm if contest.selected else nan, answer)  # type: ignore[arg-type]
