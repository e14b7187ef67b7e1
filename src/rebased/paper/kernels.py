"""Table 1 and Figures 3 and 4: six kernels in narrow models."""

from collections.abc import Iterator
from functools import partial
from itertools import product
from statistics import fmean

from rebased.paper import mqar
from rebased.paper.evidence import Evidence
from rebased.paper.finding import Finding
from rebased.paper.mqar import Group
from rebased.paper.values import KERNEL_ORDER, RATES, TABLE_1, TABLE_1_PAIRS, TABLE_1_WIDTHS, Place
from rebased.paper.verdict import Contest, hold_claims
from rebased.report.page import figure
from rebased.report.synthetic import figures
from rebased.report.synthetic.cells import Cell, accuracy_of

LENGTHS = tuple(dict.fromkeys(place.seq_len for place in TABLE_1))
OTHERS = [kernel for kernel in KERNEL_ORDER if kernel != "ReBased"]


def find_kernels(evidence: Evidence) -> Iterator[Finding]:
    """Table 1, Figure 3, Figure 4."""
    groups = mqar.groups_of(evidence.runs, lambda place: place in TABLE_1, evidence.precision)
    group = groups[0] if groups else mqar.NO_RUNS
    table_1 = hold_claims(mqar.over_widths(group, seq_len, "ReBased", other) for seq_len in LENGTHS for other in OTHERS)
    yield mqar.finding(
        "Table 1",
        group,
        mqar.hold_cells(TABLE_1, group),
        table_1,
        draw=partial(by_width, group, "table-1"),
        remarks=[*mqar.wrong_rows(TABLE_1, group), *unused(groups)],
    )
    yield mqar.finding("Figure 3", group, (), hold_claims([*at_each_width(group), grows(group)]))
    yield mqar.finding("Figure 4", group, (), hold_claims(at_random_rates(group)))


def unused(groups: list[Group]) -> Iterator[str]:
    """The records that depart more from the paper's protocol, and are not used."""
    for group in groups[1:]:
        yield f"Not used: {', '.join(mqar.sources(group.runs))} ({'; '.join(group.departures)})."


def by_width(group: Group, key: str) -> str:
    """Accuracy by width, with the paper's values as crosses; empty if there are no runs."""
    if not group.cells:
        return ""
    panels = figures.accuracy_by_width(group.results)
    caption = "Mean over seeds at the chosen rate; bars: standard deviation over seeds; crosses: the paper's means."
    return figure(panels._replace(name=key), caption)


def at_each_width(group: Group) -> Iterator[Contest]:
    """The claims that ReBased recalls more than another kernel, at each length and width."""
    for seq_len, d_model, other in product(LENGTHS, TABLE_1_WIDTHS, OTHERS):
        cells = {place: cell for place, cell in group.cells.items() if place.d_model == d_model}
        found = mqar.over_widths(group._replace(cells=cells), seq_len, "ReBased", other)
        yield found._replace(what=f"T = {seq_len:,}, D = {d_model}: ReBased recalls more than {other}")


def grows(group: Group) -> Contest:
    """The claim that ReBased leads Based by more in long sequences than in short ones."""

    def lead(found: Contest) -> dict[int, float] | None:
        ours, theirs = found.ours or {}, found.others or {}
        return {seed: ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())} or None

    short, long = (mqar.over_widths(group, seq_len, "ReBased", "Based") for seq_len in LENGTHS)
    what = f"ReBased leads Based by more at T = {LENGTHS[1]:,} than at T = {LENGTHS[0]}"
    return Contest(what, lead(long), lead(short), pair=long.pair, learned=long.learned and short.learned)


def at_random_rates(group: Group) -> Iterator[Contest]:
    """Figure 4: the claims that ReBased recalls more at a learning rate drawn at random, the mean over the rates that
    both models have. With one try all estimators of expected performance are this mean."""
    for seq_len, d_model, other in product(LENGTHS, TABLE_1_WIDTHS, OTHERS):
        what = f"T = {seq_len:,}, D = {d_model}: ReBased recalls more than {other} at a random rate"
        places = (Place(model, seq_len, TABLE_1_PAIRS, d_model) for model in ("ReBased", other))
        cells = [group.cells[place] for place in places if place in group.cells]
        rates = [rate for rate in RATES if all(rate in cell.runs for cell in cells)]
        if len(cells) < 2 or len(rates) < 2:
            yield Contest(what, pair=("ReBased", other))
        else:
            held_out = all(run.held_out is not None for cell in cells for run in cell.all_runs)
            ours, theirs = (mean_over(cell, rates, held_out) for cell in cells)
            yield Contest(what, ours, theirs, pair=("ReBased", other), learned=mqar.have_learned(cells))


def mean_over(cell: Cell, rates: list[float], held_out: bool) -> dict[int, float]:
    """The mean accuracy over learning rates, for the seeds that all of them have."""
    seeds = set.intersection(*(set(cell.runs[rate]) for rate in rates))
    return {seed: fmean(accuracy_of(cell.runs[rate][seed], held_out) for rate in rates) for seed in sorted(seeds)}
