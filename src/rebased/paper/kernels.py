"""Table 1 and Figures 3 and 4: six kernels in narrow models."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from statistics import fmean

from rebased.paper import mqar
from rebased.paper.contents import BY_NAME
from rebased.paper.cost import Cost
from rebased.paper.evidence import Evidence
from rebased.paper.finding import Finding
from rebased.paper.mqar import Group, Pair
from rebased.paper.printed_figures import papers_accuracy
from rebased.paper.values import KERNEL_ORDER, TABLE_1, TABLE_1_WIDTHS, Place
from rebased.report.page import figure
from rebased.report.synthetic import figures
from rebased.report.synthetic.cells import Cell
from rebased.runs.finished import Run

LENGTHS = tuple(dict.fromkeys(place.seq_len for place in TABLE_1))
OTHERS = [kernel for kernel in KERNEL_ORDER if kernel != "ReBased"]
CELL = "cell"


def find_kernels(evidence: Evidence) -> Iterator[Finding]:
    """Table 1, Figure 3, Figure 4."""
    groups = mqar.groups_of(evidence.runs, lambda place: place in TABLE_1)
    cost = mqar.cost_of(evidence.speeds, TABLE_1, groups[0] if groups else None)
    if not groups:
        for name in ("Table 1", "Figure 3", "Figure 4"):
            draw = partial(papers_accuracy, TABLE_1, "figure-3", hidden=False) if name == "Figure 3" else str
            claims = mqar.hold_claims(over_all_widths(None)) if name == "Table 1" else []
            numbers = mqar.hold_cells(TABLE_1, None) if name == "Table 1" else []
            yield Finding(BY_NAME[name], "none", numbers, claims, cost=cost, unit=CELL, draw=draw)
        return
    table, *others = (find_table(group) for group in groups)
    yield replace(table, cost=cost, others=others)
    group = groups[0]
    yield Finding(
        BY_NAME["Figure 3"],
        group.protocol,
        table.numbers,
        mqar.hold_claims([*at_each_width(group), grows(group)]),
        departures=group.departures,
        stated=group.stated,
        draw=lambda: by_width(group, "figure-3") + papers_accuracy(TABLE_1, "figure-3"),
        remarks=["The numbers are those of Table 1, and so are protocol and records."],
        unit=CELL,
        seeds=group.seeds,
        sources=table.sources,
        cost=cost,
        hidden_numbers=True,
    )
    yield find_budgets(groups, cost)


def find_table(group: Group) -> Finding:
    """Table 1 from one group of runs."""
    return Finding(
        BY_NAME["Table 1"],
        group.protocol,
        mqar.hold_cells(TABLE_1, group),
        mqar.hold_claims(over_all_widths(group)),
        departures=group.departures,
        stated=group.stated,
        settings=mqar.settings_table(group, len(TABLE_1)),
        unit=CELL,
        seeds=group.seeds,
        sources=mqar.sources(group.runs),
    )


def over_all_widths(group: Group | None) -> Iterator[Pair]:
    """The claims that ReBased recalls more than another kernel, at each length."""
    for seq_len in LENGTHS:
        for other in OTHERS:
            yield mqar.over_widths(group, seq_len, "ReBased", other)


def by_width(group: Group, key: str) -> str:
    """Accuracy by width, with the paper's values as crosses."""
    panels = figures.accuracy_by_width(group.results)
    caption = (
        "Mean over seeds at the chosen learning rate; bars are the sample standard deviation over seeds. Crosses: the "
        "paper's means. Points of one width are shifted sideways a little."
    )
    return figure(panels._replace(name=key), caption)


def at_each_width(group: Group) -> Iterator[Pair]:
    """The claims that ReBased recalls more than another kernel, at each length and width."""
    for seq_len in LENGTHS:
        for d_model in TABLE_1_WIDTHS:
            narrowed = group._replace(cells={place: cell for place, cell in group.cells.items() if place[3] == d_model})
            for other in OTHERS:
                _, ours, theirs = mqar.over_widths(narrowed, seq_len, "ReBased", other)
                yield f"T = {seq_len:,}, D = {d_model}: ReBased recalls more than {other}", ours, theirs


def by_budget(group: Group) -> str:
    """Expected accuracy by number of learning rates tried."""
    panels = figures.budgets(group.results, replacement=True)
    caption = "Expected accuracy of the best of n learning rates, drawn with replacement from those that were tried."
    return figure(panels._replace(name="figure-4"), caption)


def grows(group: Group) -> Pair:
    """The claim that ReBased leads Based by more in long sequences than in short ones."""
    leads = []
    for seq_len in (LENGTHS[1], LENGTHS[0]):
        _, ours, theirs = mqar.over_widths(group, seq_len, "ReBased", "Based")
        seeds = ours.keys() & theirs.keys() if ours and theirs else set()
        leads.append({seed: ours[seed] - theirs[seed] for seed in sorted(seeds)} if ours and theirs else None)
    long, short = leads
    return f"ReBased leads Based by more at T = {LENGTHS[1]:,} than at T = {LENGTHS[0]}", long, short


def find_budgets(groups: list[Group], cost: Cost | None) -> Finding:
    """Figure 4, from the group whose cells have most learning rates."""
    group = max(groups, key=lambda group: max(len(mqar.rates_of(cell)) for cell in group.cells.values()))
    tuned = {place: cell for place, cell in group.cells.items() if len(mqar.rates_of(cell)) > 1}
    claims = mqar.hold_claims(
        one_try(tuned, Place("ReBased", seq_len, 32, d_model), other)
        for seq_len in LENGTHS
        for d_model in TABLE_1_WIDTHS
        for other in OTHERS
    )
    if not tuned:
        return Finding(BY_NAME["Figure 4"], "none", (), claims, cost=cost, why="the runs have one learning rate")
    kept = group._replace(cells=tuned)
    return Finding(
        BY_NAME["Figure 4"],
        kept.protocol,
        (),
        claims,
        departures=kept.departures,
        stated=kept.stated,
        settings=mqar.settings_table(kept, len(TABLE_1)),
        draw=partial(by_budget, group),
        seeds=kept.seeds,
        sources=mqar.sources(kept.runs),
        cost=cost,
    )


def one_try(cells: Mapping[Place, Cell], place: Place, other: str) -> Pair:
    """The claim that ReBased recalls more at a learning rate drawn at random: by seed, the mean over the rates that
    both models have."""
    what = f"T = {place.seq_len:,}, D = {place.d_model}: ReBased recalls more than {other} at a rate drawn at random"
    ours, theirs = cells.get(place), cells.get(place._replace(model=other))
    if ours is None or theirs is None:
        return what, None, None
    rates = [rate for rate in mqar.rates_of(ours) if rate in theirs.runs]
    if len(rates) < 2:
        return what, None, None
    held_out = all(run.held_out is not None for cell in (ours, theirs) for run in cell.all_runs)
    return f"{what} (of {len(rates)})", mean_over(ours, rates, held_out), mean_over(theirs, rates, held_out)


def mean_over(cell: Cell, rates: list[float], held_out: bool) -> dict[int, float]:
    """The mean accuracy over learning rates, for the seeds that all of them have, on the test split, or with `held_out`
    on the held-out split where a run has one."""

    def accuracy(run: Run) -> float:
        return run.held_out if held_out and run.held_out is not None else run.best.accuracy

    seeds = set.intersection(*(set(cell.runs[rate]) for rate in rates))
    return {seed: fmean(accuracy(cell.runs[rate][seed]) for rate in rates) for seed in sorted(seeds)}
