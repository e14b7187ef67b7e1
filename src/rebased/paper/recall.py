"""Figures 1 and 7: recall by length and width, with and without a first convolution."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial

from rebased.paper import mqar
from rebased.paper.contents import BY_NAME
from rebased.paper.evidence import Evidence
from rebased.paper.finding import Finding
from rebased.paper.kernels import by_width
from rebased.paper.mqar import Group
from rebased.paper.printed_figures import papers_accuracy
from rebased.paper.values import FIGURE_1, FIGURE_1_PAIRS, FIGURE_1_WIDTHS, Place

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
    """Figure 1, Figure 7."""
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
            nothing = find_figure(name, None, contests[name], len(places))
            run = {place.model for group in groups for place in group.cells}
            yield replace(nothing, cost=cost, why=half_run(models, run) if run else nothing.why)


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
        sources=mqar.sources(run for cell in group.results.cells for run in cell.all_runs),
    )


def half_run(models: Sequence[str], run: Collection[str]) -> str:
    """Why nothing could be compared although some of the models were run."""
    parts = [[model for model in models if (model in run) is wanted] for wanted in (True, False)]
    there, lacking = (" and ".join(part) for part in parts)
    return f"{there} were run, and {lacking}, which they are compared with, were not"
