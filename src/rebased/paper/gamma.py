"""Figure 10: gamma and beta along training, and what weight decay alone leaves of gamma."""

from collections.abc import Container, Iterator, Sequence
from itertools import product
from math import isnan
from statistics import fmean
from typing import NamedTuple

from rebased.analysis.paired import compare, equals
from rebased.analysis.spread import describe
from rebased.config import plural
from rebased.paper import mqar
from rebased.paper.evidence import Evidence
from rebased.paper.finding import Finding
from rebased.paper.recall import grid
from rebased.paper.reference import place_of
from rebased.paper.values import FIGURE_1_PAIRS, FIGURE_10, TABLE_1, Place
from rebased.paper.verdict import Number, hold_number
from rebased.report.reference_values import Measure
from rebased.report.synthetic import norms
from rebased.report.synthetic.cells import COUNTED, Cell
from rebased.runs.finished import Run
from rebased.runs.synthetic_config import SyntheticTrainConfig

PAPERS = SyntheticTrainConfig()  # its defaults are the paper's settings


class Decay(NamedTuple):
    """Gamma after the last epoch, and what weight decay alone would leave of it, in runs of equal settings."""

    place: Place
    lr: float
    weight_decay: float
    budget: int  # epochs of a run that does not stop early
    runs: list[Run]
    epochs: list[int]  # of each run
    gamma: list[float]  # the mean of queries and keys, of each run
    alone: list[float]

    def by_seed(self) -> dict[int, float]:
        """The mean of gamma at the end, by seed."""
        return {run.seed: gamma for run, gamma in zip(self.runs, self.gamma, strict=True)}


def find_gamma(evidence: Evidence) -> Finding:
    """Figure 10: from ReBased's runs on Figure 1's tasks, or else on those of Table 1."""
    for where in (set(grid(("ReBased",))), {place for place in TABLE_1 if place.model == "ReBased"}):
        for group in mqar.groups_of(evidence.runs, where.__contains__, evidence.precision):
            cells = [cell for cell in group.cells.values() if norms.curves(cell)]
            if cells:
                numbers = [number for cell in cells for number in hold_norms(cell)]
                numbers += not_run({cell.any_run.seq_len for cell in cells})
                decays = decays_of(evidence)
                return Finding(
                    "Figure 10",
                    group.protocol,
                    numbers,
                    departures=group.departures,
                    remarks=list(describe_decays(decays)),
                    sources=mqar.sources([*group.runs, *(run for decay in decays for run in decay.runs)]),
                )
    return Finding("Figure 10", "none", not_run())


def decays_of(evidence: Evidence) -> list[Decay]:
    """From all runs of ReBased on the tasks of Figure 1 and Table 1, by place and by how they were trained."""
    places = {*grid(("ReBased",)), *(place for place in TABLE_1 if place.model == "ReBased")}
    found: dict[tuple[Place, float, float, int], Decay] = {}
    for run in evidence.runs:
        place = place_of(run)
        if place not in places or run.status not in COUNTED or not run.epochs or not mqar.is_papers_model(run):
            continue
        means = [entry["mean"] for key, entry in norms.last_layer(run.epochs[-1]).items() if key.endswith("gamma")]
        alone = norms.decayed(run, epoch := run.epochs[-1]["epoch"])
        if isnan(alone) or not means or None in means:
            continue
        train = run.settings["train"]
        settings = (place, run.lr, train["weight_decay"], train["epochs"])
        decay = found.setdefault(settings, Decay(*settings, [], [], [], []))
        decay.runs.append(run)
        decay.epochs.append(epoch)
        decay.gamma.append(fmean(means))
        decay.alone.append(alone)
    return [found[key] for key in sorted(found)]


def describe_decays(decays: Sequence[Decay]) -> Iterator[str]:
    """How far the paper's weight decay alone gives the gamma that was measured, and what came of a test."""
    usual = [decay for decay in decays if decay.weight_decay == PAPERS.weight_decay]
    if usual:
        off = [abs(fmean(decay.gamma) - fmean(decay.alone)) for decay in usual]
        yield (
            f"Weight decay alone brings gamma near its value: over {len(usual)} settings of length, width and rate the "
            f"two differ by {fmean(off):.2f} on average, by {max(off):.2f} at most."
        )
    for none in (decay for decay in decays if decay.weight_decay == 0):
        papers = none._replace(weight_decay=PAPERS.weight_decay)[:4]
        for twin in (one for one in decays if one[:4] == papers and one.by_seed().keys() & none.by_seed().keys()):
            found = compare(none.by_seed(), twin.by_seed())
            p = f", p {equals(found.t_p)}" if not isnan(found.t_p) else ""
            yield (
                f"Without weight decay gamma ends at {fmean(none.gamma):.2f} instead of {fmean(twin.gamma):.2f} ("
                f"T = {none.place.seq_len:,}, D = {none.place.d_model}, rate {none.lr:g}; paired t test over "
                f"{plural(found.difference.n, 'seed')}{p})."
            )


def hold_norms(cell: Cell) -> Iterator[Number]:
    """The means of gamma and beta after each run's last epoch, over seeds, beside the paper's. Beta begins at the
    paper's value, so it shows nothing."""
    found: dict[str, list[float]] = {}
    for run in (run for run in cell.chosen.values() if run.epochs):
        for key, entry in norms.last_layer(run.epochs[-1]).items():
            if key in norms.NAMES and entry["mean"] is not None:
                found.setdefault(key, []).append(entry["mean"])
    for key, values in found.items():
        what = f"T = {cell.any_run.seq_len}, D = {cell.d_model}, {norms.NAMES[key]}"
        measure: Measure = "gamma" if key.endswith("gamma") else "beta"
        yield hold_number(what, FIGURE_10[measure], describe(values), given=measure == "beta")


def not_run(covered: Container[int] = ()) -> list[Number]:
    """What the figure shows at lengths that are not covered. Beta begins at its value."""
    return [
        hold_number(f"T = {seq_len}, {norms.NAMES[key]}", FIGURE_10["gamma"], None)
        for seq_len, key in product(FIGURE_1_PAIRS, ("q.gamma", "k.gamma"))
        if seq_len not in covered
    ]
