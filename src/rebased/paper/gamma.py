"""Figure 10: gamma and beta along training, and what weight decay alone leaves of gamma."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import ceil, isnan
from statistics import fmean
from typing import NamedTuple

from rebased.analysis import compare, describe
from rebased.analysis.paired import SIGNIFICANT, equals
from rebased.config import plural
from rebased.paper import mqar
from rebased.paper.contents import BY_NAME
from rebased.paper.evidence import Evidence
from rebased.paper.finding import Finding
from rebased.paper.mqar import Group
from rebased.paper.recall import grid
from rebased.paper.reference import place_of
from rebased.paper.values import EPOCHS, EXAMPLES, FIGURE_1_PAIRS, FIGURE_10, TABLE_1, Place
from rebased.paper.verdict import Number, hold_number
from rebased.report.page import details, figure
from rebased.report.synthetic import norms
from rebased.report.synthetic.cells import COUNTED, Cell
from rebased.report.tables import Table, number
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
        """Gamma by seed."""
        return {run.seed: gamma for run, gamma in zip(self.runs, self.gamma, strict=True)}


def find_gamma(evidence: Evidence) -> Finding:
    """Figure 10: from ReBased's runs on Figure 1's tasks, or else on those of Table 1."""
    item, places = BY_NAME["Figure 10"], grid(("ReBased",))
    cost = mqar.cost_of(evidence.speeds, places, None)
    group = None
    for where in (set(places), {place for place in TABLE_1 if place.model == "ReBased"}):
        groups = [group for each in mqar.groups_of(evidence.runs, where.__contains__) if (group := with_norms(each))]
        if groups:
            group = groups[0]
            break
    else:
        return Finding(item, "none", not_run(), cost=cost, why="no run recorded gamma and beta")
    numbers = [number for cell in group.cells.values() for number in hold_norms(cell)]
    covered = {place.seq_len for place in group.cells}
    numbers += [number for number in not_run() if int(number.what.split(",")[0].removeprefix("T = ")) not in covered]
    remarks = []
    if any(place in TABLE_1 for place in group.cells):
        remarks.append("These are the runs of Table 1 (32 pairs): those of Figure 1 have no record of gamma and beta.")
    decays = decays_of(evidence)
    if any(decay.weight_decay == PAPERS.weight_decay for decay in decays):
        remarks.append(describe_decays(decays))
    return Finding(
        item,
        group.protocol,
        numbers,
        departures=group.departures,
        stated=group.stated,
        settings=mqar.settings_table(group, len(places)),
        draw=partial(draw, group, decays),
        remarks=remarks,
        seeds=group.seeds,
        sources=mqar.sources([*group.runs, *(run for decay in decays for run in decay.runs)]),
        cost=mqar.cost_of(evidence.speeds, places, group),
    )


def draw(group: Group, decays: Sequence[Decay]) -> str:
    """Gamma and beta along training, one figure per width, and a table of gamma beside weight decay."""
    pictures = "".join(
        figure(norms.norm_curves(cells, f"figure-10-{n}"), f"{name}. {norms.caption(cells)}")
        for n, (name, cells) in enumerate(norms.cells_with_norms(group.results).items())
    )
    table = details("Show gamma beside weight decay", decay_table(decays).to_html()) if decays else ""
    return pictures + table


def with_norms(group: Group) -> Group | None:
    """The cells whose records hold gamma and beta; None if there is none."""
    kept = {place: cell for place, cell in group.cells.items() if norms.curves(cell)}
    if not kept:
        return None
    results = replace(group.results, cells=list(kept.values()), repeated=0)
    return group._replace(cells=kept, results=results)


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


def describe_decays(decays: Sequence[Decay]) -> str:
    """How far the paper's weight decay alone gives the gamma that was measured, and what came of a test."""
    tested = " ".join(compare_without_decay(decays))
    untested = "Training without weight decay tests it (rebased sweep results/figure10-weight-decay/sweep.yaml)."
    decays = [decay for decay in decays if decay.weight_decay == PAPERS.weight_decay]
    off = [abs(fmean(decay.gamma) - fmean(decay.alone)) for decay in decays]
    ours = [fmean(decay.gamma) for decay in decays]
    steps = ceil(EXAMPLES / PAPERS.batch_size)
    alone = partial(norms.decay_alone, weight_decay=PAPERS.weight_decay, steps=steps, epochs=EPOCHS, epoch=EPOCHS)
    return (
        "AdamW's weight decay pulls gamma from 1 towards 0 whatever the data are: with the paper's settings it alone "
        f"leaves {alone(3e-3):.2f} of it after {EPOCHS} epochs at a learning rate of 3e-3, and "
        f"{alone(1e-3):.2f} at 1e-3. Over {len(decays)} settings of length, width and rate our gamma lies "
        f"between {min(ours):.2f} and {max(ours):.2f}, and differs by {fmean(off):.2f} on average from what "
        f"weight decay alone would leave, by {max(off):.2f} at most. So weight decay may be all that brings gamma to "
        "its value. In runs that solve the task and end early gamma is still large. That was seen after the fact. "
        + (tested or untested)
    )


def compare_without_decay(decays: Sequence[Decay]) -> Iterator[str]:
    """Gamma without weight decay beside gamma with the paper's, in otherwise equal runs: one sentence per setting."""
    for none in (decay for decay in decays if decay.weight_decay == 0):
        papers = none._replace(weight_decay=PAPERS.weight_decay)[:4]
        for usual in (
            decay for decay in decays if decay[:4] == papers and decay.by_seed().keys() & none.by_seed().keys()
        ):
            found = compare(none.by_seed(), usual.by_seed())
            p = f", p {equals(found.t_p)}" if not isnan(found.t_p) else ""
            without, beside = fmean(none.gamma), fmean(usual.gamma)
            so = ""
            if found.t_p < SIGNIFICANT and beside < min(without, 1):
                so = f" So weight decay makes up {100 * (without - beside) / (1 - beside):.0f} % of its fall from 1."
            yield (
                f"Without weight decay gamma ends at {without:.2f} instead of {beside:.2f} ("
                f"T = {none.place.seq_len:,}, D = {none.place.d_model}, rate {none.lr:g}; paired t test over "
                f"{plural(found.difference.n, 'seed')}{p}).{so}"
            )


def decay_table(decays: Sequence[Decay]) -> Table:
    """Gamma beside weight decay alone."""
    rows = [
        (
            f"T = {decay.place.seq_len:,}, D = {decay.place.d_model}, rate {decay.lr:g}"
            + ("" if decay.weight_decay == PAPERS.weight_decay else f", weight decay {decay.weight_decay:g}"),
            mqar.span(decay.epochs),
            str(len(decay.gamma)),
            number(fmean(decay.gamma)),
            number(fmean(decay.alone)),
        )
        for decay in decays
    ]
    return Table(("", "epochs", "seeds", "mean of gamma", "weight decay alone"), rows)


def hold_norms(cell: Cell) -> list[Number]:
    """The means of gamma and beta after each run's last epoch, over seeds, beside the paper's."""
    found: dict[str, list[float]] = {}
    for run in cell.chosen.values():
        for key, entry in (norms.last_layer(run.epochs[-1]) if run.epochs else {}).items():
            if key in norms.NAMES and entry["mean"] is not None:
                found.setdefault(key, []).append(entry["mean"])
    return [
        hold_number(
            f"T = {cell.any_run.seq_len}, D = {cell.d_model}, {norms.NAMES.get(key, key)}",
            FIGURE_10["gamma" if key.endswith("gamma") else "beta"],
            describe(values),
        )
        for key, values in found.items()
    ]


def not_run() -> list[Number]:
    """What the figure shows, not measured."""
    return [
        hold_number(f"T = {seq_len}, {words}", FIGURE_10["gamma" if key.endswith("gamma") else "beta"], None)
        for seq_len in FIGURE_1_PAIRS
        for key, words in norms.NAMES.items()
        if not key.startswith("qk")
    ]
