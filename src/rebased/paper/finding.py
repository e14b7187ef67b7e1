"""What was found about one table or figure: numbers, claims, protocol and pictures. The verdict follows from them."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isnan

from rebased.config import plural
from rebased.paper.contents import SAYS
from rebased.paper.verdict import ANSWERS, Claim, Number, Outcome, Protocol, Verdict, judge
from rebased.report.tables import NONE, Table, number, p_text

SPACE = "\u00a0"  # where a line must not end
OUTCOMES: tuple[Outcome, ...] = ("agrees", "differs", "too wide to tell")
OUTCOMES += ("by construction", "did not learn", "one seed")


@dataclass(frozen=True)
class Finding:
    """Everything that the page says about a table or figure."""

    name: str  # of the table or figure
    protocol: Protocol
    numbers: Sequence[Number] = ()
    claims: Sequence[Claim] = ()
    departures: Sequence[str] = ()  # from the paper's protocol, in words
    draw: Callable[[], str] = str  # returns tables and pictures as HTML; called for a page only
    remarks: Sequence[str] = ()
    unit: str = "number"  # what a number is called in a sentence
    sources: Sequence[str] = ()  # names of the files with the records
    same_as: str = ""  # the table whose claims are its own; empty if it makes others

    @property
    def verdict(self) -> Verdict:
        """What the numbers and claims say together."""
        return "shared" if self.same_as else judge(self.numbers, self.claims, self.protocol)

    @property
    def sentence(self) -> str:
        """The verdict's reason: '10 claims: 1 holds, 9 not run; 3 of 48 cells measured: 1 agrees, 2 differs.'"""
        parts = [f"its claims are those of {self.same_as}"] if self.same_as else []
        if answers := [claim.answer for claim in self.claims if not claim.replaced]:
            parts.append(f"{plural(len(answers), 'claim')}: {tally(answers, ANSWERS)}")
        if self.numbers:
            outcomes = [one.outcome for one in self.numbers if one.outcome != "not run"]
            said = f": {tally(outcomes, OUTCOMES)}" if outcomes else ""
            parts.append(f"{len(outcomes) or 'none'} of {plural(len(self.numbers), self.unit)} measured{said}")
        said = "; ".join(parts)
        return f"{'Only a stand-in was run. ' if self.protocol == 'stand-in' else ''}{said[:1].upper()}{said[1:]}."

    def number_table(self) -> Table | None:
        """The numbers that are not the paper's; None if there is none. The sentence says how many others there are."""
        wrong = [one for one in self.numbers if one.outcome in ("differs", "did not learn")]
        rows = [(one.what, one.paper, one.ours or NONE, number(one.difference, "+.3f"), one.outcome) for one in wrong]
        return Table((self.unit, "paper", "ours", "difference", "outcome"), rows) if rows else None

    def claim_table(self) -> Table | None:
        """The claims that are decided, with their tests; None if there is none. The sentence counts the others."""
        rows = [claim_row(claim) for claim in self.claims if claim.answer in ("holds", "contradicted", "equal")]
        return Table(CLAIM_HEAD, rows) if rows else None

    def to_record(self) -> dict[str, object]:
        """The finding as JSON data."""
        return {
            "name": self.name,
            "says": SAYS[self.name],
            "verdict": self.verdict,
            "protocol": self.protocol,
            "departures": list(self.departures),
            "sentence": self.sentence,
            "numbers": [one._asdict() for one in self.numbers],
            "claims": [claim_record(claim) for claim in self.claims],
            "sources": list(self.sources),
        }


CLAIM_HEAD = ("claim of the paper", "paper", "ours (95 % interval)", "corrected p", "p, not paired", "answer")


def tally(found: Sequence[str], order: Sequence[str]) -> str:
    """'1 holds, 4 undecided', '2 hold': how often each word was found, in this order."""
    counts = Counter(found)
    plurals = {"holds": "hold", "holds here": "hold here", "agrees": "agree", "differs": "differ"}
    words = ((counts[word], word if counts[word] == 1 else plurals.get(word, word)) for word in order)
    return ", ".join(f"{count} {word}" for count, word in words if count)


def claim_row(claim: Claim, source: str = "") -> tuple[str, ...]:
    """The cells of a measured claim, after its `source`: the paper's difference, ours, two p values, the answer."""
    assert claim.difference is not None
    mean, low, high, p = claim.difference
    paper, interval = claim.contest.paper, "" if isnan(low) else f"({low:+.3f} to {high:+.3f})".replace(" ", SPACE)
    ps = (p_text(each).replace(" ", SPACE) for each in (p, claim.unpaired))
    papers = number(paper.difference if paper else None, "+.3f")
    answer = "; ".join(filter(None, (claim.answer, claim.note)))
    what = f"{claim.what} ({claim.mark})" if claim.mark else claim.what
    return (source + what, papers, f"{mean:+.3f} {interval}".strip(), *ps, answer)


def claim_record(claim: Claim) -> dict[str, object]:
    """A claim as JSON data."""
    about = {"what": claim.what, "unit": claim.contest.unit, "outcome": claim.answer, "replaced": claim.replaced}
    about |= {"paper": claim.contest.paper.difference if claim.contest.paper else None}
    if claim.planned:
        return about | claim.planned._asdict()
    if claim.found is None:
        return about
    tests = {"p": claim.found.t_p, "holm_p": claim.found.t_holm, "unpaired_p": claim.unpaired}
    return about | claim.found.difference._asdict() | {"seeds": list(claim.found.seeds)} | tests


def words_table(table: Table) -> str:
    """A table within the width of the text: cells may take several lines, and columns without a value are left out."""
    kept = [n for n, cells in enumerate(zip(*table.rows, strict=True)) if n == 0 or set(cells) - {NONE}]
    head, *rows = (tuple(row[n] for n in kept) for row in (table.head, *table.rows))
    return Table(head, rows).to_html().replace('class="wide"><table', 'class="wide text"><table class="words"', 1)
