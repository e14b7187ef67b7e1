"""Table 3 and Figures 2, 5, 8 and 9: where trained models look, from records of probes."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from rebased.config import plural
from rebased.paper import mqar
from rebased.paper.contents import BY_NAME
from rebased.paper.cost import Cost, mqar_minutes
from rebased.paper.evidence import Evidence, Probe
from rebased.paper.finding import Finding
from rebased.paper.mqar import Pair
from rebased.paper.precision import STATED
from rebased.paper.printed_figures import similarity_functions
from rebased.paper.reference import PAPER, PROBED_EXAMPLES, SEQ_LEN, deviations, is_of_table_3
from rebased.paper.values import KERNEL_ORDER, RATES, SEEDS, TABLE_3
from rebased.paper.verdict import Number, Protocol, hold_number
from rebased.report.page import details, figure
from rebased.report.probe import figures, tables
from rebased.report.probe.cells import ProbeCell, group_probes, run_of
from rebased.report.tables import plus_minus

WIDTHS = (64, 128)  # of the sweep table3; the paper does not state its own
SMALL = "0.01"  # the share of the uniform weight below which a token counts as ignored
IGNORED = 0.01  # of the mean similarity: what is below it is near zero
Measure = Callable[[ProbeCell], Mapping[int, float]]


class Probes(NamedTuple):
    """Probes that depart from the paper's protocol in the same settings: the models of Table 3, and ablations."""

    cells: Sequence[ProbeCell]
    departures: Sequence[str]
    stated: Sequence[str]  # differences from the paper that are no departures
    protocol: Protocol
    files: Sequence[str]
    remarks: Sequence[str]

    @property
    def seeds(self) -> str:
        """'5', or '3 to 5'"""
        return mqar.span([len(cell.records) for cell in self.cells if cell.model.kind in TABLE_3])


def find_attention(evidence: Evidence) -> Iterator[Finding]:
    """Table 3, Figure 2, Figure 5, Figure 8, Figure 9."""
    probes = choose(evidence)
    cost = cost_of(evidence) if probes is None or probes.protocol != "paper" else None
    iou = ahead(probes, lambda cell: cell.values("iou"), "has a higher IoU than")
    mass = ahead(probes, lambda cell: cell.values("mass"), "has more attention on the answers than")
    noisy = ahead(
        probes, lambda cell: {seed: -n for seed, n in cell.values("noisy").items()}, "has fewer noisy tokens than"
    )
    first = [("Attention", "ReBased"), ("Attention", "Based")]
    everything = [*first, ("ReBased", "Based")]
    shares = ahead(probes, ignored, f"gives more tokens less than {SMALL} of their share than")
    for name, numbers, claims, draw in (
        ("Table 3", table_3(probes), iou(everything), partial(table_html, probes)),
        ("Figure 2", minima(probes), shares([("ReBased", "Based")]), partial(similarity_pictures, probes)),
        ("Figure 5", [], iou(first), partial(maps, probes)),
        ("Figure 8", [], mass(first), partial(maps, probes, "mean")),
        ("Figure 9", [], noisy(everything), partial(rows, probes)),
    ):
        held = mqar.hold_claims(claims)
        if probes is None:
            only = similarity_functions if name == "Figure 2" else str
            yield Finding(BY_NAME[name], "none", numbers, held, cost=cost, draw=only)
            continue
        yield Finding(
            BY_NAME[name],
            probes.protocol,
            numbers,
            held,
            departures=probes.departures,
            stated=probes.stated,
            draw=draw,
            remarks=probes.remarks,
            seeds=probes.seeds,
            sources=probes.files,
            cost=cost,
        )


def choose(evidence: Evidence) -> Probes | None:
    """The probes that depart least from the paper's protocol, the ablations with them. Without any of the paper's task
    and models, those of another task: a stand-in."""
    groups: dict[tuple[str, ...], list[tuple[str, Probe]]] = {}
    for file, probe in evidence.probes:
        if probe["model"] in (*TABLE_3, *KERNEL_ORDER) and is_of_table_3(run_of(probe)):
            groups.setdefault(tuple(departures_of(probe)), []).append((file, probe))
    own = {settings: pairs for settings, pairs in groups.items() if any(map(is_main, pairs))}
    if not own:
        others = [pair for pair in evidence.probes if is_main(pair)]
        cells = group_probes([probe for _, probe in others], PAPER) if others else []
        kept = [cell for cell in cells if cell.task == cells[0].task]
        files = sorted({file for file, _ in others})
        return Probes(kept, [f"another task ({cells[0].task})"], [], "stand-in", files, []) if kept else None
    settings, *weaker = sorted(own, key=lambda settings: rank(settings, own[settings]))
    cells = group_probes([probe for _, probe in own[settings]], PAPER)
    main = [cell for cell in cells if cell.model.kind in TABLE_3]
    stated = [words for words in settings if words == STATED]
    departures = [*(words for words in settings if words != STATED), *rates_words(evidence, main)]
    seeds = [len(cell.records) for cell in main]
    if min(seeds) < SEEDS:
        departures.append(f"{mqar.seeds_words(seeds)} instead of {SEEDS}")
    unused = [unused_words(more, own[more]) for more in weaker]
    files = sorted({file for file, _ in own[settings]})
    return Probes(cells, departures, stated, "departs" if departures else "paper", files, unused)


def unused_words(settings: Sequence[str], pairs: Sequence[tuple[str, Probe]]) -> str:
    """What probes that depart more from the paper's protocol found, in one sentence."""
    cells = [cell for cell in group_probes([probe for _, probe in pairs]) if cell.model.kind in TABLE_3]
    values = "; ".join(f"{cell.name}: {plus_minus(cell.spread('iou'))}" for cell in cells)
    return f"Not used: {plural(len(pairs), 'probe')} that depart more ({'; '.join(settings)}). Their IoU: {values}."


def is_main(pair: tuple[str, Probe]) -> bool:
    """Whether a probe is of one of the three models of Table 3."""
    return pair[1]["model"] in TABLE_3


def rank(settings: Sequence[str], pairs: Sequence[tuple[str, Probe]]) -> tuple[bool, int, int, int]:
    """A sort key, as that of groups of runs: one seed last, then by departures, of which precision counts least."""
    seeds = {probe["config"]["train"]["seed"] for _, probe in pairs}
    severe = sum(not words.startswith("precision") for words in settings)
    return len(seeds) < 2, severe, -len(pairs), len(settings)


def departures_of(probe: Probe) -> list[str]:
    """The settings in which a probe differs from the paper's experiment, in words; all but STATED are departures."""
    found = deviations(run_of(probe))
    if probe["examples"] < PROBED_EXAMPLES:
        found.append(f"{probe['examples']:,} probed examples instead of {PROBED_EXAMPLES:,}")
    return found


def rates_words(evidence: Evidence, cells: Sequence[ProbeCell]) -> list[str]:
    """A departure if the records do not show that the paper's learning rates were tried for every probed model."""
    tried: dict[str, set[float]] = {}
    for run in evidence.runs:
        tried.setdefault(model_and_task(run.settings), set()).add(run.lr)
    counts = [len(tried.get(model_and_task(cell.first["config"]), set()) & set(RATES)) for cell in cells]
    if min(counts) == len(RATES):
        return []
    if max(counts) == 0:
        return ["how many learning rates were tried is in no record here"]
    return [f"{mqar.span(counts)} of the paper's {len(RATES)} learning rates"]


def model_and_task(settings: Mapping[str, object]) -> str:
    """A key: the model and the task of a run's settings."""
    return json.dumps([settings["model"], settings["task"]], sort_keys=True)


def ahead(probes: Probes | None, measure: Measure, words: str) -> Callable[[Sequence[tuple[str, str]]], list[Pair]]:
    """A function from pairs of models to claims that the first is ahead in a measure, at each width."""

    def claims(contests: Sequence[tuple[str, str]]) -> list[Pair]:
        found: list[Pair] = []
        for d_model in widths(probes) or WIDTHS:
            cells = {cell.model.kind: cell for cell in probes.cells if cell.d_model == d_model} if probes else {}
            for one, other in contests:
                both = (cells[one], cells[other]) if one in cells and other in cells else None
                values = tuple(measure(cell) for cell in both) if both else (None, None)
                found.append((f"D = {d_model}: {one} {words} {other}", values[0], values[1]))
        return found

    return claims


def widths(probes: Probes | None) -> list[int]:
    """The widths of the probed models."""
    return sorted({cell.d_model for cell in probes.cells}) if probes else []


def ignored(cell: ProbeCell) -> dict[int, float]:
    """By seed: the share of weights below SMALL times the uniform one."""
    found = {seed: record["layers"][-1]["similarity"] for seed, record in cell.records.items()}
    return {seed: part["small"][SMALL] for seed, part in found.items() if part and SMALL in part["small"]}


def table_3(probes: Probes | None) -> list[Number]:
    """IoU and accuracy of the paper's three models beside ours, at each width; none of a stand-in's."""
    own = probes is not None and probes.protocol != "stand-in"
    numbers = []
    for d_model in (widths(probes) if own else None) or WIDTHS:
        for model, row in TABLE_3.items():
            cells = (
                [cell for cell in probes.cells if (cell.model.kind, cell.d_model) == (model, d_model)]
                if probes and own
                else []
            )
            name = f"{model}, D = {d_model}"
            numbers.append(hold_number(f"{name}, IoU", row.iou, cells[0].spread("iou") if cells else None))
            numbers.append(hold_number(f"{name}, accuracy", row.accuracy, cells[0].accuracy if cells else None))
    return numbers


def minima(probes: Probes | None) -> list[Number]:
    """The smallest similarity of Based, and of ReBased beside its mean, over all seeds of a width."""
    numbers = []
    for d_model in widths(probes) or WIDTHS:
        for model, paper in (("Based", "≥ 0.50"), ("ReBased", "0")):
            what = f"{model}, D = {d_model}, smallest similarity{'' if model == 'Based' else ' / mean'}"
            cells = (
                [cell for cell in probes.cells if (cell.model.kind, cell.d_model) == (model, d_model)] if probes else []
            )
            parts = tables.similarities(cells[0]) if cells else []
            if not parts:
                numbers.append(Number(what, paper, None, None, 0, "not run"))
                continue
            relative = [part["least"] / (part["mean"] if model == "ReBased" else 1.0) for part in parts]
            least = min(relative)
            good = least >= 0.5 * (1 - 1e-6) if model == "Based" else least < IGNORED
            numbers.append(Number(what, paper, f"{least:.3g}", None, len(parts), "agrees" if good else "differs"))
    return numbers


def at_width(probes: Probes | None) -> Iterator[tuple[int, list[ProbeCell]]]:
    """The cells of each width."""
    for d_model in widths(probes):
        yield d_model, [cell for cell in probes.cells if cell.d_model == d_model] if probes else []


def table_html(probes: Probes | None) -> str:
    """All measures of all models."""
    if probes is None:
        return ""
    more = tables.look_table(probes.cells).to_html()
    return details(
        "Show IoU of the best head and of the mean matrix, mass, entropy and noisy tokens",
        tables.iou_table(probes.cells).to_html() + more,
    )


def maps(probes: Probes | None, which: str = "best") -> str:
    """Attention matrices of one example, one figure per width."""
    words = {"best": "each model's best head", "mean": "the mean over heads"}[which]
    html = ""
    for d_model, cells in at_width(probes):
        drawn = figures.attention_maps(cells, 0, which)
        if drawn:
            caption = (
                f"D = {d_model}, one example, first seed, {words}. Rows: questions; columns: positions of the pairs."
            )
            html += figure(drawn, caption)
    return html


def rows(probes: Probes | None) -> str:
    """The attention of the last question, one figure per width."""
    html = ""
    for d_model, cells in at_width(probes):
        panels = figures.last_rows(cells)
        if panels:
            caption = f"D = {d_model}, one example, best head of the first seed: attention of the last question."
            html += figure(panels._replace(name=f"figure-9-{d_model}"), caption)
    return html


def similarity_pictures(probes: Probes | None) -> str:
    """Similarities over the density of scores, and against q . k before gamma and beta."""
    html = similarity_functions()
    for d_model, cells in at_width(probes):
        panels = figures.similarity_panels(cells)
        if panels:
            caption = (
                f"D = {d_model}. Line: similarity divided by its mean. Grey: how often a score occurs, first seed."
            )
            html += figure(panels._replace(name=f"figure-2-{d_model}"), caption)
        parabolas = figures.parabola_panels(cells)
        if parabolas:
            caption = (
                f"D = {d_model}, against q · k before γ and β, as in the paper's drawing. It is no function of q · k "
                "alone: the band holds 80 % of the pairs, the line is the parabola that fits best."
            )
            html += figure(parabolas._replace(name=f"figure-2-parabola-{d_model}"), caption)
    return html


def cost_of(evidence: Evidence) -> Cost:
    """What the paper's three models would cost, at both widths of the sweep table3."""
    cells = [(model, SEQ_LEN, d_model) for model in ("ConvAttention", "Based", "ReBased") for d_model in WIDTHS]
    runs = len(cells) * len(RATES) * SEEDS
    what = f"The three models at D = 64 and 128 by the paper's protocol: {runs} runs"
    return Cost(mqar_minutes(evidence.speeds, cells), what, evidence.speeds.records[:2])
