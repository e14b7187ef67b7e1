"""Figures 1, 7 and 10: recall by length and width, with and without a first convolution, and gamma and beta."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from rebased.analysis import describe
from rebased.report.page import figure
from rebased.report.paper import mqar
from rebased.report.paper.evidence import Evidence
from rebased.report.paper.exhibits import BY_NAME
from rebased.report.paper.finding import Finding
from rebased.report.paper.kernels import by_width
from rebased.report.paper.mqar import Group
from rebased.report.paper.redrawn import papers_accuracy
from rebased.report.paper.values import FIGURE_1, FIGURE_1_PAIRS, FIGURE_1_WIDTHS, FIGURE_10, TABLE_1, Place
from rebased.report.paper.verdict import Number, hold_number
from rebased.report.synthetic import norms
from rebased.report.synthetic.cells import Cell

FIGURE_1_MODELS = ("ConvAttention", "ReBased", "Based", "RWKV", "Mamba")
FIGURE_7_MODELS = ("Attention", "ConvAttention", "RWKV", "ConvRWKV")


def grid(models: tuple[str, ...]) -> list[Place]:
    """The places of a figure."""
    return [
        Place(model, seq_len, pairs, d_model)
        for model in models
        for seq_len, pairs in FIGURE_1_PAIRS.items()
        for d_model in FIGURE_1_WIDTHS
    ]


def find_recall(evidence: Evidence) -> Iterator[Finding]:
    """Figure 1, Figure 7, Figure 10."""
    contests = {
        "Figure 1": [("ReBased", other) for other in ("Based", "RWKV", "Mamba")],
        "Figure 7": [("ConvAttention", "Attention"), ("RWKV", "ConvRWKV")],
    }
    for name, models in (("Figure 1", FIGURE_1_MODELS), ("Figure 7", FIGURE_7_MODELS)):
        places = grid(models)
        groups = mqar.groups_of(evidence.runs, set(places).__contains__)
        found = [find_figure(name, group, contests[name], len(places)) for group in groups]
        told = [finding for finding in found if finding.is_measured]
        cost = mqar.cost_of(evidence.speeds, places, groups[0] if groups else None)
        if told:
            yield replace(told[0], cost=cost, others=told[1:])
        else:
            yield replace(find_figure(name, None, contests[name], len(places)), cost=cost)
    yield find_norms(evidence)


def find_figure(name: str, group: Group | None, contests: Sequence[tuple[str, str]], places: int) -> Finding:
    """Figure 1 or 7 from one group of runs, or from none."""
    numbers = mqar.hold_cells(FIGURE_1, group) if name == "Figure 1" else []
    claims = mqar.hold_claims(
        mqar.over_widths(group, seq_len, *contest) for seq_len in FIGURE_1_PAIRS for contest in contests
    )
    papers = partial(papers_accuracy, FIGURE_1, "figure-1", hidden=group is not None) if name == "Figure 1" else str
    if group is None:
        return Finding(BY_NAME[name], "none", numbers, claims, unit="cell", draw=papers)
    return Finding(
        BY_NAME[name],
        group.protocol,
        numbers,
        claims,
        departures=group.departures,
        stated=group.stated,
        settings=mqar.settings_table(group, places),
        draw=lambda: by_width(group, BY_NAME[name].key) + papers(),
        remarks=mqar.remark_on_mamba(group),
        unit="cell",
        seeds=group.seeds,
        sources=mqar.sources(group.runs),
    )


def find_norms(evidence: Evidence) -> Finding:
    """Figure 10: from ReBased's runs on Figure 1's tasks, or else on those of Table 1."""
    exhibit, places = BY_NAME["Figure 10"], grid(("ReBased",))
    cost = mqar.cost_of(evidence.speeds, places, None)
    group = None
    for where in (set(places), {place for place in TABLE_1 if place.model == "ReBased"}):
        groups = [group for each in mqar.groups_of(evidence.runs, where.__contains__) if (group := with_norms(each))]
        if groups:
            group = groups[0]
            break
    else:
        return Finding(exhibit, "none", not_run(), cost=cost, why="no run recorded gamma and beta")
    numbers = [number for cell in group.cells.values() for number in hold_norms(cell)]
    covered = {place.seq_len for place in group.cells}
    numbers += [number for number in not_run() if int(number.what.split(",")[0].removeprefix("T = ")) not in covered]
    ours = any(place in TABLE_1 for place in group.cells)
    remark = "These are the runs of Table 1 (32 pairs): those of Figure 1 have no record of gamma and beta."
    return Finding(
        exhibit,
        group.protocol,
        numbers,
        departures=group.departures,
        stated=group.stated,
        settings=mqar.settings_table(group, len(places)),
        draw=partial(curves, group),
        remarks=[remark] if ours else [],
        seeds=group.seeds,
        sources=mqar.sources(group.runs),
        cost=mqar.cost_of(evidence.speeds, places, group),
    )


def curves(group: Group) -> str:
    """Gamma and beta along training, one figure per width."""
    return "".join(
        figure(norms.norm_curves(cells, f"figure-10-{n}"), f"{name}. {norms.CAPTION}")
        for n, (name, cells) in enumerate(norms.cells_with_norms(group.results).items())
    )


def with_norms(group: Group) -> Group | None:
    """The cells whose records hold gamma and beta; None if there is none."""
    kept = {place: cell for place, cell in group.cells.items() if norms.curves(cell)}
    if not kept:
        return None
    results = type(group.results)(list(kept.values()), 0)
    return group._replace(cells=kept, results=results)


def hold_norms(cell: Cell) -> list[Number]:
    """The means of gamma and beta after each run's last epoch, over seeds, beside the paper's."""
    found: dict[str, list[float]] = {}
    for run in cell.chosen.values():
        layers = (run.epochs[-1].get("norms") or {}) if run.epochs else {}
        for key, entry in (layers[max(layers, key=int)] if layers else {}).items():
            if key in norms.NAMES and entry["mean"] is not None:
                found.setdefault(key, []).append(entry["mean"])
    return [
        hold_number(
            f"T = {cell.any_run.seq_len}, D = {cell.d_model}, {norms.NAMES.get(key, key)}",
            FIGURE_10[key.split(".")[1]],
            describe(values),
        )
        for key, values in found.items()
    ]


def not_run() -> list[Number]:
    """What the figure shows, not measured."""
    return [
        hold_number(f"T = {seq_len}, {words}", FIGURE_10[key.split(".")[1]], None)
        for seq_len in FIGURE_1_PAIRS
        for key, words in norms.NAMES.items()
        if not key.startswith("qk")
    ]
