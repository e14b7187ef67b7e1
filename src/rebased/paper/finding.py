"""What was found about one table or figure: numbers, claims, protocol and pictures. The verdict follows from them."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rebased.config import plural
from rebased.paper.contents import PaperItem
from rebased.paper.cost import Cost
from rebased.paper.verdict import Claim, Number, Outcome, Protocol, Verdict, judge
from rebased.report.tables import NONE, Table, number, p_text

OUTCOMES: dict[Outcome, str] = {
    "agrees": "agrees",
    "differs": "differs",
    "undecided": "undecided",
    "untested": "untested (one seed)",
    "not run": "not run",
}
CLAIMS: dict[Outcome, str] = {**OUTCOMES, "agrees": "holds", "differs": "contradicted"}
PROTOCOLS: dict[Protocol, str] = {
    "paper": "the paper's protocol",
    "departs": "the paper's experiment, with departures",
    "stand-in": "a stand-in",
    "none": "no record",
}


@dataclass(frozen=True)
class Finding:
    """Everything that the page says about a table or figure."""

    item: PaperItem
    protocol: Protocol
    numbers: Sequence[Number] = ()
    claims: Sequence[Claim] = ()
    departures: Sequence[str] = ()  # from the paper's protocol, in words
    stated: Sequence[str] = ()  # differences from the paper that are no departures, in words
    settings: Table | None = None  # the paper's protocol beside ours
    draw: Callable[[], str] = str  # returns pictures as HTML; called for a page only
    remarks: Sequence[str] = ()
    unit: str = "number"  # what a number is called in a sentence
    done: str = "measured"  # and what was done to it
    seeds: str = NONE
    sources: Sequence[str] = ()  # names of the files with the records
    cost: Cost | None = None  # of what is not run
    why: str = "no record of it"  # nothing was run, if so
    hidden_numbers: bool = False  # they stand in another table's section
    others: Sequence["Finding"] = ()  # from records that depart more; no verdict rests on them

    @property
    def verdict(self) -> Verdict:
        """The verdict, by the one rule."""
        return judge(self.numbers, self.claims, self.protocol)

    @property
    def is_measured(self) -> bool:
        """Whether some number or claim was measured."""
        outcomes = {*(number.outcome for number in self.numbers), *(claim.outcome for claim in self.claims)}
        return bool(outcomes - {"not run"})

    @property
    def counts(self) -> str:
        """'12 of 48 cells measured, 2 of them agree; 10 claims: 1 holds, 4 undecided, 5 not run'"""
        parts = []
        if self.numbers:
            outcomes = Counter(number.outcome for number in self.numbers)
            some, every = len(self.numbers) - outcomes["not run"], plural(len(self.numbers), self.unit)
            alone = f", {outcomes['untested']} untested (one seed)" if outcomes["untested"] else ""
            agreeing = f"{some:,} of {every} {self.done}, {outcomes['agrees']} of them agree{alone}"
            parts.append(agreeing if some else f"none of {every} {self.done}")
        return "; ".join([*parts, *([self.claim_counts] if self.claims else [])])

    @property
    def claim_counts(self) -> str:
        """'10 claims: 1 holds, 4 undecided, 5 not run'"""
        counted = Counter(claim.outcome for claim in self.claims)
        words = CLAIMS | {"agrees": "hold" if counted["agrees"] > 1 else "holds"}
        said = [f"{counted[outcome]} {word}" for outcome, word in words.items() if counted[outcome]]
        return f"{plural(len(self.claims), 'claim')}: {', '.join(said)}"

    @property
    def sentence(self) -> str:
        """The verdict's reason in one sentence."""
        if self.protocol == "none":
            cost = f"; it would take {self.cost.brief} on one H200" if self.cost else ""
            return f"{self.why[:1].upper()}{self.why[1:]}{cost}."
        departures, counts = "; ".join(self.departures), f"{self.counts[:1].upper()}{self.counts[1:]}"
        if self.protocol == "stand-in":
            return f"Only a stand-in was run: {departures}. There, {self.claim_counts}."
        if not self.settings_matter:
            return f"{counts}."
        stated = f" Stated, and no departure: {'; '.join(self.stated)}." if self.stated else ""
        if self.protocol == "paper":
            return f"{counts}. By the paper's protocol.{stated}"
        return f"{counts}. Departures from the paper's protocol: {departures}.{stated}"

    @property
    def settings_matter(self) -> bool:
        """False for what is computed and not trained."""
        return self.done == "measured"

    def number_table(self) -> Table | None:
        """The measured numbers beside the paper's; None if there is none."""
        measured = [one for one in self.numbers if one.outcome != "not run"]
        if not measured or self.hidden_numbers:
            return None
        if not self.settings_matter:
            equal = [
                (one.what, one.paper, one.ours or NONE, number(one.difference, ",.0f"), OUTCOMES[one.outcome])
                for one in measured
            ]
            return Table((self.unit, "paper", "ours", "difference", "outcome"), equal)
        rows = [
            (
                one.what,
                one.paper,
                one.ours or NONE,
                number(one.difference, "+.3f"),
                str(one.seeds),
                OUTCOMES[one.outcome],
            )
            for one in measured
        ]
        return Table((self.unit, "paper", "ours", "difference", "seeds", "outcome"), rows)

    def claim_table(self) -> Table | None:
        """The measured claims with their paired tests; None if there is none."""
        rows = []
        for claim in self.claims:
            if claim.found is not None:
                spread = claim.found.difference
                rows.append(
                    (
                        claim.what,
                        number(spread.mean, "+.3f"),
                        number(spread.sd),
                        str(spread.n),
                        p_text(claim.found.t_holm),
                        CLAIMS[claim.outcome],
                    )
                )
        head = ("claim of the paper", "our difference", "sd over seeds", "paired seeds", "Holm p", "outcome")
        return Table(head, rows) if rows else None

    def missing_numbers(self) -> Table | None:
        """The paper's values that were not measured, one column per width where names end in one; None if there are
        none, or they stand elsewhere."""
        absent = {one.what: one.paper for one in self.numbers if one.outcome == "not run"}
        if not absent or self.hidden_numbers:
            return None
        parts = [what.rpartition(", ") for what in absent]
        if not all(last.startswith("D = ") for _, _, last in parts):
            return Table(("not run", "paper"), list(absent.items()))
        rows, columns = (list(dict.fromkeys(part[side] for part in parts)) for side in (0, 2))
        columns.sort(key=lambda column: int(column.removeprefix("D = ")))
        cells = [(row, *(absent.get(f"{row}, {column}", NONE) for column in columns)) for row in rows]
        return Table(("not run: the paper's values", *columns), cells)

    def missing_claims(self) -> list[str]:
        """The claims that were not tested: one line per statement, with the places where it was not."""
        places: dict[str, list[str]] = {}
        for one in self.claims:
            if one.outcome == "not run":
                place, _, statement = one.what.rpartition(": ")
                places.setdefault(statement, []).extend([place] if place else [])
        at = {statement: f" ({'; '.join(where)})" if where else "" for statement, where in places.items()}
        return [f"Not tested: {statement}{where}." for statement, where in at.items()]

    def to_record(self) -> dict[str, object]:
        """The finding as JSON data."""
        return {
            "name": self.item.name,
            "title": self.item.title,
            "verdict": self.verdict,
            "protocol": self.protocol,
            "departures": list(self.departures),
            "stated": list(self.stated),
            "sentence": self.sentence,
            "seeds": self.seeds,
            "numbers": [one._asdict() for one in self.numbers],
            "claims": [claim_record(claim) for claim in self.claims],
            "sources": list(self.sources),
            "cost": None if self.cost is None else {"gpu_minutes": round(self.cost.minutes), "what": str(self.cost)},
            "redo": list(self.item.redo),
            "not_used": [{"sentence": one.sentence, "sources": list(one.sources)} for one in self.others],
        }


def claim_record(claim: Claim) -> dict[str, object]:
    """A claim as JSON data."""
    found = claim.found
    about: dict[str, object] = {"what": claim.what, "outcome": CLAIMS[claim.outcome]}
    if found is not None:
        about |= {"difference": found.difference.mean, "sd": found.difference.sd, "seeds": list(found.seeds)}
        about |= {"p": found.t_p, "holm_p": found.t_holm}
    return about
