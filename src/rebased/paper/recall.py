"""Figures 1 and 7: recall by length and width, with and without a first convolution."""

from collections.abc import Iterator
from functools import partial

from rebased.paper import mqar
from rebased.paper.evidence import Evidence
from rebased.paper.finding import Finding
from rebased.paper.kernels import by_width
from rebased.paper.reference import PAPER, place_of
from rebased.paper.values import FIGURE_1, FIGURE_1_PAIRS, FIGURE_1_WIDTHS, Place
from rebased.paper.verdict import hold_claims
from rebased.report.synthetic.cells import COUNTED, build_results
from rebased.report.tables import plus_minus

FIGURE_1_MODELS = ("ConvAttention", "ReBased", "Based", "RWKV", "Mamba")
FIGURE_7_MODELS = ("Attention", "ConvAttention", "RWKV", "ConvRWKV")
CONTESTS = {
    "Figure 1": [("ReBased", other) for other in ("Based", "RWKV", "Mamba")],
    "Figure 7": [("ConvAttention", "Attention"), ("RWKV", "ConvRWKV")],
}


def grid(models: tuple[str, ...]) -> list[Place]:
    """The places of a figure."""
    return [
        Place(model, seq_len, pairs, d_model)
        for model in models
        for seq_len, pairs in FIGURE_1_PAIRS.items()
        for d_model in FIGURE_1_WIDTHS
    ]


def find_recall(evidence: Evidence) -> Iterator[Finding]:
    """Figure 1, Figure 7. Of the latter, one model of a pair alone is no record."""
    for name, models in (("Figure 1", FIGURE_1_MODELS), ("Figure 7", FIGURE_7_MODELS)):
        groups = mqar.groups_of(evidence.runs, set(grid(models)).__contains__, evidence.precision)
        for group in [*groups, mqar.NO_RUNS]:
            numbers, remarks = [], []
            if name == "Figure 1":
                numbers = mqar.hold_cells(FIGURE_1, group)
                remarks = [*mqar.wrong_rows(FIGURE_1, group), *own_mamba(evidence)]
            claims = hold_claims(
                mqar.over_widths(group, seq_len, *pair) for seq_len in FIGURE_1_PAIRS for pair in CONTESTS[name]
            )
            if not group.cells or any(claim.found for claim in claims) or any(number.ours for number in numbers):
                draw = partial(by_width, group, name.lower().replace(" ", "-"))
                yield mqar.finding(name, group, numbers, claims, draw=draw, remarks=remarks)
                break


def own_mamba(evidence: Evidence) -> Iterator[str]:
    """A sentence on runs of Mamba with its own initialization, which is a departure: another experiment."""
    places = set(grid(("Mamba",)))
    runs = [
        run
        for run in evidence.runs
        if run.status in COUNTED and mqar.has_own_start(run) and mqar.is_papers_model(run) and place_of(run) in places
    ]
    if runs:
        cells = build_results(runs, PAPER).cells
        listed = "; ".join(f"T = {cell.any_run.seq_len}, D = {cell.d_model}: {plus_minus(cell.test)}" for cell in cells)
        yield (
            "Not held against the paper: Mamba with its own initialization, whose step size has "
            f"a bias (in the paper's code a hook zeroes it, so that it forgets at once), recalls {listed}."
        )
