"""When a claim holds, when a number agrees, and when a table or figure counts as reproduced."""

from collections.abc import Iterable, Mapping, Sequence
from math import isnan, nan, sqrt
from typing import Literal, NamedTuple, get_args

from rebased.analysis.paired import SIGNIFICANT, Comparison, compare_all, holm
from rebased.analysis.spread import Spread
from rebased.analysis.unpaired import Effect, effect
from rebased.report.reference_values import MARGIN, Agreement, ReferenceValue, agreement
from rebased.report.synthetic.cells import LEARNED

Verdict = Literal["reproduced", "partly", "in small part", "undecided", "not reproduced", "not run", "shared"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
Answer = Literal[
    "holds", "contradicted", "equal", "undecided", "holds here", "opposite here", "did not learn", "one seed", "not run"
]
Outcome = Agreement | Literal["by construction", "did not learn", "one seed", "not run"]
ANSWERS: tuple[Answer, ...] = get_args(Answer)
HERE: dict[Answer, Answer] = {"holds": "holds here", "contradicted": "opposite here"}  # what a stand-in says
TESTED = ANSWERS[:6]
Protocol = Literal["paper", "departs", "stand-in", "none"]
"""How the records that were used were made: by the paper's protocol; in the paper's experiment, but with departures
from its protocol; in another experiment (another text, task or size), which stands in for it; or there are none."""

RULES = (
    f"A claim holds if our difference has the paper's sign and p is below {SIGNIFICANT:g}: paired t test over seeds, "
    "Holm's correction over its table or figure. With the other sign it is contradicted. It is equal if two one-sided "
    "tests put the difference within the margin. All else is undecided.",
    f"Margins: {MARGIN:g} of accuracy, 0.016 of IoU, 0.01 nats; the last two are the paper's differences.",
    "Intervals are not corrected: one may exclude 0 where p decides nothing. Fragile: permutations, which take two "
    "groups to be equally spread, decide; Welch's test does not.",
    "A planned test replaces an earlier claim, which then does not count, if its plan says so and both compare the "
    "same quantity. Else both count.",
    f"Did not learn: no run of one of two models had an accuracy {LEARNED:g} above guessing. Such runs cannot show "
    "that a mixer recalls less. They have no p, but count in Holm's correction, and are left out if other widths "
    "learned.",
    "The learning rate of a seed is chosen on the other seeds, accuracy is measured on a held-out split. P "
    "without pairs is corrected too.",
    "A number agrees if the 90 % interval of its difference lies within the margin, and differs if the 95 % interval "
    "excludes 0. Else it is too wide to tell.",
    "A verdict follows the share of all claims that hold; of numbers that agree only where no claim is made. What "
    "follows from a definition does not count. Reproduced: all, by the paper's protocol. Partly: at least half. In "
    "small part: fewer. Not reproduced: more are contradicted than hold. Shared: its claims are another's. A stand-in "
    "(another text, other sizes) is not judged.",
)


class Contest(NamedTuple):
    """A statement of the paper that one value is greater than another, and our values by seed; None: not measured."""

    what: str
    ours: Mapping[int, float] | None = None  # of what should be greater
    others: Mapping[int, float] | None = None
    paper: Effect | None = None  # the paper's difference
    margin: float = MARGIN
    unit: str = "accuracy"
    pair: tuple[str, str] = ("", "")  # the model that the paper puts first, and the other
    learned: bool = True  # False if no run of one of the two models learned
    widths: Sequence[int] = ()  # D of the compared models, where it is named


class Difference(NamedTuple):
    """A difference with its 95 % interval, which is nan for few seeds, and its corrected p; nan if no model learned."""

    mean: float
    low: float
    high: float
    p: float


class Claim(NamedTuple):
    """A contest and its tests."""

    contest: Contest
    found: Comparison | None = None  # paired by seed, corrected over the claims of its table; None: not measured
    unpaired: float = nan  # p without pairs, corrected too
    answer: Answer = "not run"
    planned: Difference | None = None  # of a planned test, which is not paired
    replaced: bool = False  # a planned test has taken its place: it is shown and does not count
    mark: str = ""  # after the statement: "planned", or "earlier" if it is replaced
    note: str = ""  # what limits the answer

    @property
    def difference(self) -> Difference | None:
        """What was measured; None if nothing was."""
        if self.found is None:
            return self.planned
        spread = self.found.difference
        return Difference(spread.mean, spread.low, spread.high, self.found.t_holm)

    @property
    def what(self) -> str:
        """The statement."""
        return self.contest.what


class Number(NamedTuple):
    """A number of the paper beside ours."""

    what: str
    paper: str
    ours: str | None = None  # None: not measured
    difference: float | None = None  # ours - paper's; None if that means nothing
    seeds: int = 0
    outcome: Outcome = "not run"


def judge(numbers: Sequence[Number], claims: Sequence[Claim], protocol: Protocol) -> Verdict:
    """The verdict on a table or figure, as RULES says it in words."""
    if protocol in ("stand-in", "none"):
        return "not run"
    outcomes = [number.outcome for number in numbers if number.outcome != "by construction"]
    found = [claim.answer for claim in claims if not claim.replaced] or outcomes
    if not set(found) - {"one seed", "not run"}:
        return "not run"
    yes, no = (sum(word in words for word in found) for words in (("holds", "agrees"), ("contradicted", "differs")))
    if protocol == "paper" and yes == len(found) and "differs" not in outcomes:
        return "reproduced"
    if no > yes:
        return "not reproduced"
    return "undecided" if not yes else "partly" if 2 * yes >= len(found) else "in small part"


def hold_number(what: str, paper: ReferenceValue, ours: Spread | None, *, given: bool = False) -> Number:
    """A mean of the paper beside our mean over seeds; None if it was not measured. `given` is a number that follows
    from a definition, or that training begins with."""
    shown = f"{'≥ ' if paper.at_least else ''}{paper.mean:.{2 if paper.error > 0.001 else 3}f}"
    shown += f" ± {paper.sd:.2f}" if paper.sd is not None else ""
    if ours is None:
        return Number(what, shown)
    text = f"{ours.mean:.3f}" + ("" if isnan(ours.sd) else f" ± {ours.sd:.3f}")
    outcome: Outcome = "by construction" if given else "one seed" if ours.n < 2 else agreement(ours, paper)
    return Number(what, shown, text, ours.mean - paper.mean, ours.n, outcome)


def hold_claims(contests: Iterable[Contest]) -> list[Claim]:
    """All claims of a table or figure, tested together: Holm's correction is over those that were measured."""
    claims = [Claim(contest) for contest in contests]
    pairs = [(contest.ours or {}, contest.others or {}) for contest, *_ in claims]
    tested = [n for n, (ours, others) in enumerate(pairs) if ours.keys() & others.keys()]
    found = compare_all([pairs[n] for n in tested])
    sides = [[list(side.values()) for side in pairs[n]] for n in tested]
    apart = holm([effect({0: ours}, {0: others}).p for ours, others in sides])
    for n, one, unpaired in zip(tested, found, apart, strict=True):
        contest = claims[n].contest
        if contest.learned:
            claims[n] = Claim(contest, one, unpaired, answer_of(one, contest))
        else:  # the p of such runs shows nothing
            claims[n] = Claim(contest, one._replace(t_p=nan, t_holm=nan), answer="did not learn")
    return claims


def answer_of(found: Comparison, contest: Contest) -> Answer:
    """The answer to a claim from a comparison of (what the paper finds greater) - (the other)."""
    if found.difference.n < 2:
        return "one seed"
    if found.t_holm < SIGNIFICANT:
        return "holds" if found.difference.mean > 0 else "contradicted"
    return "equal" if is_within(found.difference, contest.margin) else "undecided"


def is_within(found: Spread, margin: float) -> bool:
    """Whether paired differences are smaller than a margin on average, by two one-sided tests."""
    return Effect(found.mean, found.sd / sqrt(found.n), found.n - 1, found.n, found.n).is_within(margin)
