"""The top of the page: five sentences that answer, what limits them, and one plot of all effects with intervals."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import isnan

from rebased.paper.answered import PLANS
from rebased.paper.finding import Finding
from rebased.paper.kernels import LENGTHS
from rebased.paper.planned import JudgedPlan
from rebased.paper.values import KERNEL_ORDER, TABLE_1, Place
from rebased.paper.verdict import TESTED, Claim
from rebased.report.drawing import SERIES, Interval, Panels, draw_intervals, draw_panels
from rebased.report.probe.cells import LIVE
from rebased.report.prose import has_changes

FIRST = ("Table 1", "Figure 1", "Table 2", "Table 3")  # tables and figures in the order of their importance
READ = {"holds": "yes", "holds here": "yes", "contradicted": "no", "opposite here": "no"}
REVERSED = {"yes": "no", "no": "yes"}
UNITS = {"accuracy": "Accuracy on MQAR", "nats": "Loss on text, nats per token", "IoU": "Attention on answers, IoU"}
EARLIER = SERIES[5]  # the colour of runs that a planned test has replaced
SOFTMAX = ("Attention", "ConvAttention")
BASED, ATTENTION = ("ReBased", "Based"), ("ReBased", "Attention")
ASKED = {  # by question: the table that answers it
    "Does ReBased recall more than Based?": "Table 1",
    "Does it model text better than Based?": "Table 2",
    "Is it better than attention?": "Table 2",
    "Does it look at answers more than Based?": "Table 3",
}


def main_claims(findings: Mapping[str, Finding]) -> list[tuple[str, Claim]]:
    """Pairs of a table or figure and a claim that was measured with several seeds, the most important first."""
    claims = [(name, claim) for name in FIRST for claim in findings[name].claims]
    return [(name, claim) for name, claim in claims if claim.difference and claim.answer != "one seed"]


def sentences(findings: Mapping[str, Finding]) -> list[str]:
    """Does ReBased recall more than Based? Model text better, than attention too? Where does it look? What is open?"""
    text = findings["Table 2"]
    said = (in_recall(findings), on_text(text, BASED), on_text(text, ATTENTION), in_heads(findings["Table 3"]))
    answers = (f"{question} {answer[0].upper()}{answer[1:]}." for question, answer in zip(ASKED, said, strict=True))
    return [*answers, what_is_open(findings)]


def in_recall(findings: Mapping[str, Finding]) -> str:
    """Of the narrow models of Table 1 by length, then of wider ones."""
    table = findings["Table 1"].claims
    groups = {f"T = {seq_len:,}": between(table, BASED, f"T = {seq_len:,}:") for seq_len in LENGTHS}
    others = between([claim for name in ("Figure 3", "Figure 1") for claim in findings[name].claims], BASED)
    wider = [claim for claim in others if min(claim.contest.widths, default=0) > max(narrow(findings), default=0)]
    return f"in narrow models {by_answer(groups)}; wider: {read(wider)}"


def on_text(table: Finding, pair: tuple[str, str]) -> str:
    """By experiment. A stand-in cannot compare attention: no effect is given, and AR tokens, where the paper puts
    attention first, are read too."""
    unfair = pair == ATTENTION and table.protocol == "stand-in"
    groups: dict[str, list[Claim]] = {}
    for claim in between(table.claims, pair, "all ") + between(table.claims, pair[::-1], "AR ") * unfair:
        where = claim.what.partition(":")[0].partition(" with ")[0].partition(", ")[2]
        groups.setdefault(where or "these runs", []).append(claim)
    if unfair and groups:
        said = by_answer(groups, effect=False)
        return f"not comparable: attention lacks the short convolution. All and AR tokens: {said}"
    return f"{'on small texts ' * (table.protocol == 'stand-in')}{by_answer(groups)}"


def in_heads(table: Finding) -> str:
    """Of live heads, and of the mean over all heads."""
    claims = between(table.claims, BASED)
    live = [claim for claim in claims if "live" in claim.what]
    others = [claim for claim in claims if "live" not in claim.what]
    depends = live and others and read(live) != read(others)
    return f"{'depends on the heads: ' * bool(depends)}{by_answer({'live': live, 'all': others})}"


def what_is_open(findings: Mapping[str, Finding]) -> str:
    """How many claims are open, and how the others came out."""
    claims = [claim for finding in findings.values() for claim in finding.claims if not claim.replaced]
    counts = Counter(claim.answer for claim in claims)
    softmax = sum(claim.answer == "holds" and claim.contest.pair[0] in SOFTMAX for claim in claims)
    return (
        f"What is open? Of {len(claims)} claims {sum(claim.answer not in TESTED for claim in claims)} are untested, "
        f"{counts['undecided']} undecided; {counts['holds']} hold ({softmax}: attention first), "
        f"{counts['contradicted']} contradicted, {counts['opposite here']} opposite here."
    )


def between(claims: Iterable[Claim], pair: tuple[str, str], begin: str = "") -> list[Claim]:
    """The measured claims about two models that count, without those of one seed."""
    return [
        claim
        for claim in claims
        if claim.contest.pair == pair and claim.what.startswith(begin)
        if claim.difference and not claim.replaced and claim.answer != "one seed"
    ]


def narrow(findings: Mapping[str, Finding]) -> list[int]:
    """The widths at which Table 1 compares ReBased and Based."""
    return sorted({width for claim in between(findings["Table 1"].claims, BASED) for width in claim.contest.widths})


def read(claims: Iterable[Claim]) -> str:
    """The distinct answers, of ReBased: 'yes', 'undecided or no'; 'untested' without a claim."""
    words = []
    for claim in claims:
        word = READ.get(claim.answer, claim.answer)
        words.append(word if claim.contest.pair[0] == "ReBased" else REVERSED.get(word, word))
    return " or ".join(dict.fromkeys(words)) or "untested"


def effects(claims: Sequence[Claim]) -> str:
    """The difference with its interval; of several the differences alone: ': +0.023 fragile, +0.072'."""
    found = [(claim.difference, " fragile" * claim.note.startswith("fragile")) for claim in claims]
    said = [f"{difference.mean:+.3f}{fragile}" for difference, fragile in found if difference]
    said += [f"{one.low:+.3f} to {one.high:+.3f}" for one, _ in found if one and len(found) == 1 and not isnan(one.low)]
    return f": {', '.join(said)}" if said else ""


def by_answer(groups: Mapping[str, Sequence[Claim]], effect: bool = True) -> str:
    """'yes (T = 256: +0.154, +0.070 to +0.238), untested (T = 2,048)', perhaps with the first effect."""
    said: dict[str, list[str]] = {}
    for name, claims in groups.items():
        said.setdefault(read(claims), []).append(name + (effects(claims) if effect else ""))
        effect = effect and not claims
    return ", ".join(f"{answer} ({'; '.join(names)})" for answer, names in said.items()) or "untested"


def caveats(findings: Mapping[str, Finding], planned: Mapping[str, JudgedPlan]) -> Iterator[str]:
    """What limits the five sentences."""
    if widths := narrow(findings):
        yield f"Narrow: D = {' and '.join(map(str, widths))} together; one width alone may be undecided."
    if not between(findings["Table 1"].claims, BASED, f"T = {LENGTHS[1]:,}:"):
        one, other = (TABLE_1[Place(model, LENGTHS[1], 32, 32)].mean for model in BASED)
        yield f"T = {LENGTHS[1]:,}, where the paper's lead is largest ({one:g} against {other:g}), has no run."
    if (text := findings["Table 2"]).protocol == "stand-in":
        yield " ".join(["Text is a stand-in; all models but those of mini-pile have one rate.", *text.remarks])
    if between(findings["Table 3"].claims, BASED):
        yield f"Live heads: IoU above {LIVE:g}. The paper does not say which heads it averages."
    plans = [(PLANS[name].table, plan) for name, plan in planned.items() if name in PLANS and plan.runs]
    changed = {table for table, plan in plans if any(map(has_changes, plan.runs))}
    unordered = {table for table, plan in plans if not plan.came_first}
    for tables, words in ((changed, "runs with changes"), (unordered, "plans not shown to be older than their runs")):
        if numbers := [str(n) for n, table in enumerate(ASKED.values(), 1) if table in tables]:
            yield f"Sentences {', '.join(numbers)} rest on {words}."


def forest(claims: Sequence[tuple[str, Claim]]) -> Panels | None:
    """One panel per unit, one row per claim: our difference with its 95 % interval, the paper's above it."""

    groups: dict[str, list[Interval]] = {}
    for name, claim in claims:
        one, other = claim.contest.pair  # the other effects are near 1
        rivals = claim.contest.unit == "nats" or (one == "ReBased" and other in KERNEL_ORDER)
        if rivals and claim.difference and not isnan(claim.difference.low):
            series, paper = ("ours, earlier", EARLIER) if claim.replaced else ("ours", SERIES[0]), claim.contest.paper
            mean, low, high, _ = claim.difference
            said = f"{claim.answer}: {mean:+.3f} ({low:+.3f} to {high:+.3f})"
            words = "; ".join(filter(None, (said, claim.mark, claim.note)))
            theirs = (paper.difference, *paper.interval()) if paper else None
            row = Interval(short(name, claim), mean, low, high, words, *series, theirs)
            groups.setdefault(UNITS[claim.contest.unit], []).append(row)
    panels = {heading: draw_intervals(rows, "paper") for heading, rows in groups.items()}
    title = "Differences with 95 % intervals, ours beside the paper's"
    return draw_panels(panels, "effects", title, 2) if panels else None


def short(name: str, claim: Claim) -> str:
    """'ReBased − Based, T = 256'; of a figure with its name, because a table may have the same length."""
    where = claim.what.partition(": ")[0].partition(" with ")[0]
    one, two = reversed(claim.contest.pair) if claim.contest.unit == "nats" else claim.contest.pair
    earlier = ", earlier" if claim.replaced else ""
    return f"{one} − {two}, {where}{earlier}" + (f", {name}" if name.startswith("Figure") else "")
