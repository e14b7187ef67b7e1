"""Table 3 and Figures 2, 5, 8 and 9: where trained models look, from records of probes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import NamedTuple

from rebased.analysis.spread import describe
from rebased.analysis.unpaired import Effect
from rebased.config import grouped
from rebased.paper import mqar
from rebased.paper.evidence import Evidence, Probe
from rebased.paper.finding import Finding, words_table
from rebased.paper.planned import JudgedPlan
from rebased.paper.precision import TF32
from rebased.paper.reference import PAPER, PROBED_EXAMPLES, deviations, is_of_table_3
from rebased.paper.values import IOU_MARGIN, KERNEL_ORDER, SEEDS, TABLE_3
from rebased.paper.verdict import Contest, Number, Outcome, Protocol, hold_claims, hold_number
from rebased.report.page import details, figure
from rebased.report.probe import figures
from rebased.report.probe.cells import LIVE, ProbeCell, group_probes, run_of
from rebased.report.probe.tables import similarities
from rebased.report.tables import NONE, Table, number, plus_minus

WIDTHS = (64, 128)  # of the sweep table3; the paper does not state its own
SMALL = "0.01"  # the share of the uniform weight below which a token counts as ignored
IGNORED = 0.01  # of the mean similarity: what is below it is near zero
Measure = Callable[[ProbeCell], Mapping[int, float]]


class Probes(NamedTuple):
    """Probes that depart from the paper's protocol in the same settings: the models of Table 3, and ablations."""

    cells: Sequence[ProbeCell]
    departures: Sequence[str]
    protocol: Protocol
    files: Sequence[str]

    @property
    def main(self) -> list[ProbeCell]:
        """The cells of the three models of Table 3."""
        return [cell for cell in self.cells if cell.model.kind in TABLE_3]

    @property
    def widths(self) -> Sequence[int]:
        """The widths of the probed models; those of the sweep table3 if there are none."""
        return sorted({cell.d_model for cell in self.cells}) or WIDTHS

    @property
    def narrowest(self) -> list[ProbeCell]:
        """The three models at the smallest width, which pictures show."""
        return [cell for cell in self.main if cell.d_model == self.widths[0]]

    def find(self, model: str, d_model: int) -> ProbeCell | None:
        """The cell of a model and width."""
        return next((cell for cell in self.cells if (cell.model.kind, cell.d_model) == (model, d_model)), None)


class Metric(NamedTuple):
    """What a table or figure measures of attention: its claims that one model is ahead of another, numbers, picture."""

    name: str  # of the table or figure
    pairs: Sequence[tuple[str, str]] = ()
    measure: Measure = lambda cell: {}
    words: str = ""  # of a claim, between the two models
    unit: str = ""
    numbers: Callable[[Probes], list[Number]] = lambda probes: []
    draw: Callable[[Probes], str] = lambda probes: ""


NO_PROBES = Probes((), (), "none", ())


def choose(evidence: Evidence) -> Probes:
    """The probes that depart least from the paper's protocol, with their ablations. If none has the paper's task and
    models, probes of another task stand in for them."""
    papers = [
        pair
        for pair in evidence.probes
        if pair[1]["model"] in (*TABLE_3, *KERNEL_ORDER) and is_of_table_3(run_of(pair[1]))
    ]
    groups = grouped(papers, lambda pair: tuple(departures_of(pair[1])))
    own = {settings: pairs for settings, pairs in groups.items() if any(map(is_main, pairs))}
    if not own:
        others = [pair for pair in evidence.probes if is_main(pair)]
        cells = group_probes([probe for _, probe in others], PAPER) if others else []
        kept = [cell for cell in cells if cell.task == cells[0].task]
        files = sorted({file for file, _ in others})
        return Probes(kept, [f"another task ({cells[0].task})"], "stand-in", files) if kept else NO_PROBES
    settings = min(own, key=lambda settings: rank(settings, own[settings]))
    found = Probes(group_probes([probe for _, probe in own[settings]], PAPER), (), "paper", ())
    departures = [words for words in settings if not (words == TF32 and evidence.precision.is_equivalent)]
    departures += unequal(evidence, found.main)
    seeds = [len(cell.records) for cell in found.main]
    if min(seeds) < SEEDS:
        departures.append(f"{mqar.span(seeds)} seeds instead of {SEEDS}")
    files = sorted({file for file, _ in own[settings]})
    return found._replace(departures=departures, protocol="departs" if departures else "paper", files=files)


def is_main(pair: tuple[str, Probe]) -> bool:
    """Whether a probe is of one of the three models of Table 3."""
    return pair[1]["model"] in TABLE_3


def rank(settings: Sequence[str], pairs: Sequence[tuple[str, Probe]]) -> tuple[bool, int, int, int]:
    """A sort key, as that of groups of runs: one seed last, then by departures, of which precision counts least."""
    seeds = {probe["config"]["train"]["seed"] for _, probe in pairs}
    severe = sum(not words.startswith("precision") for words in settings)
    return len(seeds) < 2, severe, -len(pairs), len(settings)


def departures_of(probe: Probe) -> list[str]:
    """The settings in which a probe differs from the paper's experiment, in words."""
    found = deviations(run_of(probe))
    if probe["examples"] < PROBED_EXAMPLES:
        found.append(f"{probe['examples']:,} probed examples instead of {PROBED_EXAMPLES:,}")
    return found


def unequal(evidence: Evidence, cells: Sequence[ProbeCell]) -> Iterator[str]:
    """In what the compared models were trained differently (learning rates; epochs, where runs stop early), and which
    seeds chose their rates."""
    ended = {run.digest: run.epochs[-1]["epoch"] for run in evidence.runs if run.epochs}
    rates = {record["digest"]: record["config"]["train"]["lr"] for cell in cells for record in cell.records.values()}
    for what, values in (("learning rates", rates), ("epochs until runs stopped", ended)):
        apart = []
        for d_model, alike in grouped(cells, lambda cell: cell.d_model).items():
            digests = {cell.model.kind: [record["digest"] for record in cell.records.values()] for cell in alike}
            found = [
                (kind, mqar.span([values[each] for each in some if each in values])) for kind, some in digests.items()
            ]
            if len({said for _, said in found} - {NONE}) > 1:
                apart.append(f"D = {d_model}: {', '.join(map(' '.join, found))}")
        if apart:
            yield f"{what} differ between the compared models ({'; '.join(apart)})"
    by_seed: dict[tuple[str, str, int], dict[int, set[float]]] = {}  # rates, of each model of a file
    for run in evidence.runs:
        by_seed.setdefault((run.file, run.model, run.d_model), {}).setdefault(run.seed, set()).add(run.lr)
    rates_of = [by_seed[run.file, run.model, run.d_model] for run in evidence.runs if run.digest in rates]
    chose = {seed for found in rates_of for seed in found if len(found[seed]) > min(map(len, found.values()))}
    if chose:
        yield f"seed {', '.join(map(str, sorted(chose)))} alone chose the learning rates, and counts"


def ignored(cell: ProbeCell) -> dict[int, float]:
    """By seed: the share of weights below SMALL times the uniform one."""
    found = {seed: record["layers"][-1]["similarity"] for seed, record in cell.records.items()}
    return {seed: part["small"][SMALL] for seed, part in found.items() if part and SMALL in part["small"]}


def quiet(cell: ProbeCell) -> dict[int, float]:
    """By seed: the number of noisy tokens, with a minus."""
    return {seed: -count for seed, count in cell.values("noisy").items()}


def table_3(probes: Probes) -> list[Number]:
    """IoU and accuracy of the paper's three models beside ours, at each width; none of a stand-in's."""
    own = probes if probes.protocol != "stand-in" else NO_PROBES
    numbers = []
    for d_model, (model, row) in product(own.widths, TABLE_3.items()):
        cell, name = own.find(model, d_model), f"{model}, D = {d_model}"
        numbers.append(hold_number(f"{name}, IoU", row.iou, cell.spread("iou") if cell else None))
        numbers.append(hold_number(f"{name}, accuracy", row.accuracy, cell.accuracy if cell else None))
    return numbers


def minima(probes: Probes) -> list[Number]:
    """The smallest similarity of Based, which is at least 0.5 by definition, and of ReBased beside its mean."""
    numbers = []
    for d_model, (model, paper) in product(probes.widths, (("Based", "≥ 0.50"), ("ReBased", "0"))):
        what = f"{model}, D = {d_model}, smallest similarity{'' if model == 'Based' else ' / mean'}"
        cell = probes.find(model, d_model)
        parts = similarities(cell) if cell else []
        if not parts:
            numbers.append(Number(what, paper))
            continue
        least = min(part["least"] / (part["mean"] if model == "ReBased" else 1.0) for part in parts)
        outcome: Outcome = "by construction" if model == "Based" else "agrees" if least < IGNORED else "differs"
        numbers.append(Number(what, paper, f"{least:.3g}", seeds=len(parts), outcome=outcome))
    return numbers


def heads_table(cells: Sequence[ProbeCell], of: str = "") -> str:
    """IoU as a mean over all heads, over live heads, and of the best head; how many heads live, and the accuracy."""
    rows = []
    for cell in cells:
        heads = [iou for record in cell.records.values() for iou in record["layers"][-1]["iou"]["by_head"]]
        live = plus_minus(describe(list(cell.live_iou.values()))) if cell.live_iou else NONE
        row = (cell.name, plus_minus(cell.spread("iou")), live, number(cell.spread("iou", "best").mean))
        alive = f"{sum(iou > LIVE for iou in heads)} of {len(heads)}"
        rows.append((*row, alive, number(cell.accuracy.mean)))
    head = (f"IoU, mean ± sd{of}", "all heads", "live heads", "best head", f"IoU > {LIVE:g}", "accuracy")
    return words_table(Table(head, rows)) if rows else ""


def table_3_tables(planned: Mapping[str, JudgedPlan], probes: Probes) -> str:
    """The heads of the chosen probes, and of those that plans asked for."""
    fair = {name: group_probes(plan.probes, PAPER) for name, plan in planned.items() if plan.probes}
    tables = heads_table(probes.main) + "".join(heads_table(cells, f", {name}") for name, cells in fair.items())
    return details("Show heads", tables) if tables else ""


def maps(probes: Probes) -> str:
    """Attention matrices of one example at the narrowest width: each model's best head."""
    drawn = figures.attention_maps(probes.narrowest, 0, "best")
    caption = "One example, first seed, each model's best head. Rows: questions; columns: positions of the pairs."
    return details("Show attention matrices", figure(drawn, caption)) if drawn else ""


def similarity_picture(probes: Probes) -> str:
    """Similarities over the density of scores, at the narrowest width."""
    panels = figures.similarity_panels(probes.narrowest)
    caption = "Similarity divided by its mean, over the density of the model's own scores (grey); first seed."
    return details("Show similarities", figure(panels._replace(name="figure-2"), caption)) if panels else ""


def ahead(probes: Probes, metric: Metric) -> Iterator[Contest]:
    """The claims about a metric at each width."""
    for d_model, (one, other) in product(probes.widths, metric.pairs):
        cells = [cell for name in (one, other) if (cell := probes.find(name, d_model))]
        ours, others = map(metric.measure, cells) if len(cells) == 2 else (None, None)
        what = f"D = {d_model}: {one} {metric.words} {other}"
        contest = Contest(what, ours, others, margin=0.0, unit=metric.unit, pair=(one, other))
        if metric.unit == "IoU":
            paper = Effect(TABLE_3[one].iou.mean - TABLE_3[other].iou.mean, 0, 1, 1, 1)
            contest = contest._replace(paper=paper, margin=IOU_MARGIN)
        yield contest


def find_attention(evidence: Evidence, planned: Mapping[str, JudgedPlan]) -> Iterator[Finding]:
    """One finding per table or figure; Table 3 shows the probes that plans asked for, too."""
    probes = choose(evidence)
    for metric in METRICS:
        is_table = metric.name == "Table 3"
        yield Finding(
            metric.name,
            probes.protocol,
            metric.numbers(probes),
            hold_claims(ahead(probes, metric)),
            probes.departures,
            draw=partial(table_3_tables, planned, probes) if is_table else partial(metric.draw, probes),
            sources=probes.files,
            same_as="" if metric.pairs else "Table 3",
        )


SOFTMAX = [("Attention", "ReBased"), ("Attention", "Based")]
EVERY = [("ReBased", "Based"), *SOFTMAX]
HIGHER_IOU = (lambda cell: cell.values("iou"), "has a higher IoU (mean over heads) than", "IoU")
IGNORES_MORE = f"gives more tokens less than {SMALL} of their share than"
METRICS = (
    Metric("Table 3", EVERY, *HIGHER_IOU, table_3),
    Metric("Figure 2", EVERY[:1], ignored, IGNORES_MORE, "share", minima, similarity_picture),
    Metric("Figure 5", draw=maps),  # its claims are those of Table 3
    Metric("Figure 8", SOFTMAX, lambda cell: cell.values("mass"), "has more attention on the answers than", "share"),
    Metric("Figure 9", EVERY, quiet, "has fewer noisy tokens than", "tokens"),
)
