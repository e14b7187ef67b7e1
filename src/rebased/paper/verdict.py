"""When a claim holds, when a number agrees, and when a table or figure counts as reproduced."""

from collections.abc import Iterable, Mapping, Sequence
from math import isnan, nan, sqrt
from typing import Literal, NamedTuple, get_args

from rebased.analysis.paired import SIGNIFICANT, Comparison, compare_all
from rebased.analysis.spread import Spread
from rebased.analysis.unpaired import Effect, effect
from rebased.report.reference_values import MARGIN, Agreement, ReferenceValue, agreement, difference_from
from rebased.report.synthetic.cells import LEARNED

Verdict = Literal["reproduced", "partly", "in small part", "undecided", "not reproduced", "not run"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
Answer = Literal[
    "holds",
    "contradicted",
    "equal",
    "undecided",
    "holds here",
    "opposite here",
    "did not learn",
    "one seed",
    "not run",
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
    "with Holm's correction over the claims of its table or figure. With the other sign it is contradicted. It is "
    "equal if two one-sided tests put the difference within a margin. All else is undecided.",
    "Intervals belong to the test of their row and are not corrected: one may exclude 0 where p decides nothing. "
    "Permutations take two groups to be equally spread. Where Welch's test, which does not, decides nothing, the "
    "answer is fragile.",
    "A planned test takes the place of earlier claims about the same two models. These stand beside it, marked "
    "earlier, and do not count.",
    f"If no run of one of two models learned (accuracy {LEARNED:g} above guessing) at the rates tried, the answer is "
    "did not learn: such runs cannot show that a mixer recalls less.",
    "A stand-in (another text, other sizes) is not judged. It says what holds here, and where the opposite does.",
    f"The margin is {MARGIN:g} for accuracies, 0.016 for IoU and 0.01 nats for losses; the last two are as large as "
    "the paper's differences.",
    "The learning rate of a seed is chosen on the other seeds, and accuracy is measured on a held-out split. Paired "
    "tests were chosen before the runs; runs of one seed part early, so p without pairs stands beside.",
    "A number agrees if the 90 % interval of its difference from the paper's lies within the margin, and differs if "
    "the 95 % interval excludes 0. Else the interval is too wide to tell.",
    "A verdict follows the share of all claims that hold; of numbers that agree only where a table or figure makes no "
    "claim. What follows from a definition or is an initial value does not count. Reproduced: all, by the paper's "
    "protocol. Partly: at least half. In small part: fewer. Not reproduced: more are contradicted than hold. "
    "Undecided: neither.",
)


class Contest(NamedTuple):
    """A statement of the paper that one value is greater than another, and our values by seed; None: not measured."""

    what: str
    ours: Mapping[int, float] | None = None  # of what should be greater
    others: Mapping[int, float] | None = None
    selected: tuple[Mapping[int, float], Mapping[int, float]] | None = None  # at rates chosen on the tested seeds
    paper: Effect | None = None  # the paper's difference
    margin: float = MARGIN
    unit: str = "accuracy"
    pair: tuple[str, str] = ("", "")  # the model that the paper puts first, and the other
    learned: bool = True  # False if no run of one of the two models learned


class Difference(NamedTuple):
    """A difference with its 95 % interval, which is nan for few seeds, and its corrected p."""

    mean: float
    low: float
    high: float
    p: float


class Claim(NamedTuple):
    """A contest and its tests."""

    contest: Contest
    found: Comparison | None = None  # paired by seed, corrected over the claims of its table; None: not measured
    unpaired: float = nan  # p without pairs, not corrected
    selected: float = nan  # Holm p if rates are chosen on the tested seeds; nan if nothing is chosen
    answer: Answer = "not run"
    planned: Difference | None = None  # of a planned test, which is not paired
    replaced: bool = False  # a planned test answers it: it is shown and does not count
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
    width: float = nan  # of the 90 % interval of the difference; nan without one
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
    width = nan if ours.n < 2 else difference_from(ours, paper).width
    return Number(what, shown, text, ours.mean - paper.mean, width, ours.n, outcome)


def hold_claims(contests: Iterable[Contest]) -> list[Claim]:
    """All claims of a table or figure, tested together: Holm's correction is over those that were measured."""
    claims = [Claim(contest) for contest in contests]
    pairs = [(contest.ours or {}, contest.others or {}) for contest, *_ in claims]
    tested = [n for n, (ours, others) in enumerate(pairs) if ours.keys() & others.keys()]
    found = compare_all([pairs[n] for n in tested])
    leaky = compare_all([claims[n].contest.selected or pairs[n] for n in tested])
    for n, one, other in zip(tested, found, leaky, strict=True):
        contest, (ours, others) = claims[n].contest, pairs[n]
        apart = effect({0: list(ours.values())}, {0: list(others.values())})
        selected = other.t_holm if contest.selected else nan
        claims[n] = Claim(contest, one, apart.p, selected, answer_of(one, contest))
    return claims


def answer_of(found: Comparison, contest: Contest) -> Answer:
    """The answer to a claim from a comparison of (what the paper finds greater) - (the other)."""
    if not contest.learned:
        return "did not learn"
    if found.difference.n < 2:
        return "one seed"
    if found.t_holm < SIGNIFICANT:
        return "holds" if found.difference.mean > 0 else "contradicted"
    return "equal" if is_within(found.difference, contest.margin) else "undecided"


def is_within(found: Spread, margin: float) -> bool:
    """Whether paired differences are smaller than a margin on average, by two one-sided tests."""
    return Effect(found.mean, found.sd / sqrt(found.n), found.n - 1, found.n, found.n).is_within(margin)
