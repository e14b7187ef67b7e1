"""The top of the page: five sentences that answer, and one plot of all effects with their intervals."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import isnan

from rebased.analysis.paired import equals
from rebased.paper.finding import Finding, tally
from rebased.paper.planned import Outcome
from rebased.paper.values import KERNEL_ORDER, TABLE_1, Place
from rebased.paper.verdict import TESTED, Claim
from rebased.report.drawing import INK, SERIES, Axes, Draw, Panels, draw_panels, hover

FIRST = ("Table 1", "Figure 1", "Table 2", "Table 3")  # tables and figures in the order of their importance
READ = {"holds": "yes", "contradicted": "no"}
UNITS = {"accuracy": "Accuracy on MQAR", "nats": "Loss on text, nats per token", "IoU": "Attention on answers, IoU"}


def main_claims(findings: Mapping[str, Finding]) -> list[tuple[str, Claim]]:
    """(table or figure, claim) of the measured claims in the order of their importance. Of several variants of a
    language model the first, which has most seeds."""
    found = []
    for name in FIRST:
        units = Counter[str]()
        for claim in findings[name].claims:
            units[claim.contest.unit] += 1
            if claim.found and not (name == "Table 2" and units["nats"] > 6):
                found.append((name, claim))
    return found


def sentences(findings: Mapping[str, Finding], planned: Mapping[str, Sequence[Outcome]]) -> Iterator[str]:
    """Does ReBased beat Based? Attention? Where is it undecided?"""
    text = findings["Table 2"]
    claims = {claim.what.partition(": ")[2]: claim for claim in reversed(text.claims) if "all tokens" in claim.what}
    based, softmax = (claims.get(f"ReBased has a lower loss than {other}") for other in ("Based", "Attention"))
    where = f" ({text.departures[0]})" if text.protocol == "stand-in" else ""
    yield f"Does ReBased recall more than Based? {recall(findings, planned)}"
    attention, kernel = planned.get("enwik8-one-pass", [])[:2] or (None, None)
    once = "where no token is read twice"
    yield f"Does it model text better than Based{where}? {after(by_plan(kernel, once), in_short(based))}"
    yield f"Better than attention? {after(by_plan(attention, once), in_short(softmax))} {text.headline}".rstrip()
    table = findings["Table 3"]
    looks = [claim for claim in table.claims if claim.found and claim.what.partition(": ")[2].startswith("ReBased")]
    said = " ".join(map(in_short, looks)) or "No probe here says so."
    fair = [by_plan(outcome, outcome.test.name.partition(":")[0]) for outcome in planned.get("table3-fair", [])[:2]]
    said = after(" ".join(filter(None, fair)), said)
    yield f"Does it look at the answers more than Based? {said} {table.headline}".rstrip()
    yield undecided(findings)


def recall(findings: Mapping[str, Finding], planned: Mapping[str, Sequence[Outcome]]) -> str:
    """The answer of the plan on new seeds if its runs are there, else that of Table 1."""
    for outcome in planned.get("table1-new-seeds", ())[:1]:
        if found := by_plan(outcome, "on ten new seeds"):
            return found
    claims = [claim for claim in findings["Table 1"].claims if claim.found and "than Based" in claim.what]
    return " ".join(map(in_short, claims)) or "No run here says so."


def by_plan(outcome: Outcome | None, where: str) -> str:
    """'Yes by a planned test, on ten new seeds: +0.098 (+0.019 to +0.178), p = 0.01.'; empty if runs are missing."""
    if outcome is None or outcome.answer == "incomplete":
        return ""
    answer = READ.get(outcome.answer, outcome.answer).capitalize()
    return f"{answer} by a planned test, {where}: {outcome.words}, p {equals(outcome.p)}."


def after(planned: str, others: str) -> str:
    """What a planned test says, then what the runs before it say."""
    return f"{planned} In the runs of the table: {others[0].lower()}{others[1:]}" if planned else others


def in_short(claim: Claim | None) -> str:
    """'Undecided at T = 256: +0.098 (95 % interval +0.019 to +0.178; paper +0.060), corrected p = 0.13.'"""
    if claim is None or claim.found is None:
        return "No run here says so."
    spread, paper, place = claim.found.difference, claim.contest.paper, claim.what.partition(":")[0]
    where = f" at {place}" if place.startswith(("T =", "D =")) else ""
    unit = f" {'of accuracy' if claim.contest.unit == 'accuracy' else claim.contest.unit}"
    interval = "" if isnan(spread.low) else f"95 % interval {spread.low:+.3f} to {spread.high:+.3f}"
    beside = "; ".join(filter(None, [interval, f"paper {paper.difference:+.3f}" if paper else ""]))
    value = f"{spread.mean:+.3f}{unit}" + (f" ({beside})" if beside else "")
    if claim.answer == "one seed":
        return f"Untested{where}, with one seed: {value}."
    chosen = "" if isnan(claim.selected) else f"; {equals(claim.selected)[2:]} if rates are chosen on the tested seeds"
    answer = READ.get(claim.answer, claim.answer).capitalize()
    return f"{answer}{where}: {value}, corrected p {equals(claim.found.t_holm)}{chosen}."


def undecided(findings: Mapping[str, Finding]) -> str:
    """How many claims are tested, and which runs are missing where the paper's lead is largest."""
    answers = [claim.answer for finding in findings.values() for claim in finding.claims]
    tested, said = sum(answer in TESTED for answer in answers), tally(answers, TESTED)
    one, other = (TABLE_1[Place(model, 2048, 32, 32)].mean for model in ("ReBased", "Based"))
    long = any(claim.found and "2,048" in claim.what for claim in findings["Table 1"].claims)
    missing = "" if long else f" T = 2,048, where the paper's lead is largest ({one:g} against {other:g}), has no run."
    return f"Where is it undecided? Of {len(answers)} claims {tested} are tested: {said or 'none'}.{missing}"


def forest(claims: Sequence[tuple[str, Claim]]) -> Panels | None:
    """One panel per unit, one row per claim: our difference with its 95 % interval, the paper's above it."""

    def panel(rows: Sequence[tuple[str, Claim]]) -> Draw:
        def draw(axes: Axes) -> None:
            for row, (_, claim) in enumerate(rows):
                assert claim.found is not None
                spread, paper = claim.found.difference, claim.contest.paper
                axes.hlines(-row - 0.14, spread.low, spread.high, color=SERIES[0], lw=2)
                axes.plot([spread.mean], [-row - 0.14], color=SERIES[0], marker="o", ms=5, ls="none", label="ours")
                hover(axes, [spread.mean], [-row - 0.14], [in_short(claim)])
                if paper:
                    low, high = paper.interval()
                    axes.hlines(-row + 0.14, low, high, color=SERIES[1], lw=1)
                    at = [paper.difference], [-row + 0.14]
                    axes.plot(*at, color=SERIES[1], marker="x", ms=5, ls="none", label="paper")
            axes.axvline(0, color=INK, lw=1, ls=":")
            axes.set_yticks([-row for row in range(len(rows))], [short(*row) for row in rows], fontsize=8)
            axes.set(ylim=(-len(rows) + 0.4, 0.6), xlabel="difference")

        return draw

    groups: dict[str, list[tuple[str, Claim]]] = {}
    for name, claim in claims:
        if claim.found and claim.found.difference.n > 2 and is_between_rivals(claim):
            groups.setdefault(UNITS[claim.contest.unit], []).append((name, claim))
    panels = {heading: panel(rows) for heading, rows in groups.items()}
    title = "Differences with 95 % intervals, ours beside the paper's"
    return draw_panels(panels, "effects", title, 2) if panels else None


def is_between_rivals(claim: Claim) -> bool:
    """Whether a claim is about ReBased and another kernel, or about text: the others have effects near 1."""
    other = claim.what.partition(" than ")[2].partition(" (D =")[0]
    return claim.contest.unit == "nats" or (other in KERNEL_ORDER and ": ReBased" in claim.what)


def short(name: str, claim: Claim) -> str:
    """'ReBased − Based, T = 256'; of a figure with its name, because a table may have the same length."""
    where, _, statement = claim.what.partition(": ")
    first, other = statement.split(" ")[0], statement.partition(" than ")[2].partition(" (D =")[0]
    where = where.partition(" with ")[0]
    one, two = (other, first) if claim.contest.unit == "nats" else (first, other)
    return f"{one} − {two}, {where}" + (f", {name}" if name.startswith("Figure") else "")
