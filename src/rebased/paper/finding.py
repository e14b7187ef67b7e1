"""What was found about one table or figure: numbers, claims, protocol and pictures. The verdict follows from them."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isnan

from rebased.config import plural
from rebased.paper.contents import PaperItem
from rebased.paper.verdict import Answer, Claim, Number, Outcome, Protocol, Verdict, judge
from rebased.report.tables import NONE, Table, number, p_text

SPACE = "\u00a0"  # where a line must not end
ANSWERS: tuple[Answer, ...] = ("holds", "contradicted", "equal", "undecided", "one seed", "not run")
OUTCOMES: tuple[Outcome, ...] = ("agrees", "differs", "too wide to tell", "by construction", "one seed")


@dataclass(frozen=True)
class Finding:
    """Everything that the page says about a table or figure."""

    item: PaperItem
    protocol: Protocol
    numbers: Sequence[Number] = ()
    claims: Sequence[Claim] = ()
    departures: Sequence[str] = ()  # from the paper's protocol, in words
    draw: Callable[[], str] = str  # returns tables and pictures as HTML; called for a page only
    headline: str = ""  # what must be said at the top of the page, with its claim
    remarks: Sequence[str] = ()
    unit: str = "number"  # what a number is called in a sentence
    seeds: str = NONE
    sources: Sequence[str] = ()  # names of the files with the records

    @property
    def verdict(self) -> Verdict:
        """The verdict, by the one rule."""
        return judge(self.numbers, self.claims, self.protocol)

    @property
    def sentence(self) -> str:
        """The verdict's reason: '10 claims: 1 holds, 9 not run; 3 of 48 cells measured: 1 agrees, 2 differs.'"""
        parts = [self.claim_counts] if self.claims else []
        outcomes = Counter(one.outcome for one in self.numbers)
        measured = len(self.numbers) - outcomes["not run"]
        if measured:
            said = ", ".join(counted(outcomes[outcome], outcome) for outcome in OUTCOMES if outcomes[outcome])
            parts.append(f"{measured:,} of {plural(len(self.numbers), self.unit)} measured: {said}")
        elif self.numbers:
            parts.append(f"none of {plural(len(self.numbers), self.unit)} measured")
        said = "; ".join(parts) or "nothing to measure"
        return f"{'Only a stand-in was run. ' if self.protocol == 'stand-in' else ''}{said[:1].upper()}{said[1:]}."

    @property
    def claim_counts(self) -> str:
        """'10 claims: 1 holds, 4 undecided, 5 not run'"""
        answers = Counter(claim.answer for claim in self.claims)
        said = [counted(answers[answer], answer) for answer in ANSWERS if answers[answer]]
        return f"{plural(len(self.claims), 'claim')}: {', '.join(said)}"

    def number_table(self) -> Table | None:
        """The measured numbers beside the paper's; None if there is none."""
        rows = [
            (
                one.what,
                one.paper,
                one.ours or NONE,
                number(one.difference, "+.3f"),
                number(one.width, ".2f"),
                one.outcome,
            )
            for one in self.numbers
            if one.outcome != "not run"
        ]
        return (
            Table((self.unit, "paper", "ours", "difference", "width of its 90 % interval", "outcome"), rows)
            if rows
            else None
        )

    def claim_table(self) -> Table | None:
        """The measured claims with their tests; None if there is none."""
        rows = [claim_row(claim) for claim in self.claims if claim.found]
        return Table(CLAIM_HEAD, rows) if rows else None

    def to_record(self) -> dict[str, object]:
        """The finding as JSON data."""
        return {
            "name": self.item.name,
            "title": self.item.title,
            "verdict": self.verdict,
            "protocol": self.protocol,
            "departures": list(self.departures),
            "sentence": self.sentence,
            "seeds": self.seeds,
            "numbers": [one._asdict() for one in self.numbers],
            "claims": [claim_record(claim) for claim in self.claims],
            "sources": list(self.sources),
        }


CLAIM_HEAD = (
    "claim of the paper",
    "paper",
    "ours (95 % interval)",
    "Holm p",
    "rate chosen on tested seeds",
    "not paired",
    "answer",
)


def counted(n: int, word: str) -> str:
    """'1 holds', '2 hold'; words that are no verbs stay as they are."""
    return f"{n} {word.removesuffix('s') if n != 1 and word in ('holds', 'agrees', 'differs') else word}"


def claim_row(claim: Claim) -> tuple[str, ...]:
    """The cells of a claim: the paper's difference, ours, three p values, the answer."""
    if claim.found is None:
        return (claim.what, papers_difference(claim), *[NONE] * 4, claim.answer)
    spread = claim.found.difference
    p = (str(p_text(value)).replace(" ", SPACE) for value in (claim.found.t_holm, claim.selected, claim.unpaired))
    return (claim.what, papers_difference(claim), with_interval(spread.mean, spread.low, spread.high), *p, claim.answer)


def papers_difference(claim: Claim) -> str:
    """The difference that the paper prints; a dash if it prints none."""
    return number(claim.contest.paper.difference, "+.3f") if claim.contest.paper else NONE


def with_interval(mean: float, low: float, high: float) -> str:
    """'+0.080 (+0.01 to +0.15)'; fewer than three seeds have no interval."""
    return f"{mean:+.3f}" + ("" if isnan(low) else f" ({low:+.2f} to {high:+.2f})".replace(" ", SPACE))


def claim_record(claim: Claim) -> dict[str, object]:
    """A claim as JSON data."""
    found, about = claim.found, {"what": claim.what, "unit": claim.contest.unit, "outcome": claim.answer}
    if found is None:
        return dict(about)
    paper = claim.contest.paper.difference if claim.contest.paper else None
    tests = {"p": found.t_p, "holm_p": found.t_holm, "selected_p": claim.selected, "unpaired_p": claim.unpaired}
    return about | {"paper": paper, **found.difference._asdict(), "seeds": list(found.seeds), **tests}


def words_table(table: Table) -> str:
    """A table within the width of the text: cells may take several lines."""
    return table.to_html().replace('class="wide"><table', 'class="wide text"><table class="words"', 1)
