"""What the records show and the paper does not: numbers of heads, other kernels, longer and fuller sequences."""

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from rebased.config import plural
from rebased.paper.evidence import Evidence, Probe
from rebased.paper.mqar import departures_of, sources
from rebased.paper.reference import PAPER, PAPER_TASK, place_of
from rebased.paper.values import KERNEL_ORDER, TABLE_1
from rebased.report.page import Section, commands, details, figure, paragraphs
from rebased.report.probe.figures import mass_by_distance
from rebased.report.probe.page import TEXT
from rebased.report.probe.tables import text_table
from rebased.report.synthetic import figures, narrative, tables
from rebased.report.synthetic.cells import COUNTED, build_results
from rebased.report.synthetic.comparisons import compare_models
from rebased.report.synthetic.heads import cells_by_heads
from rebased.runs.finished import Run
from rebased.runs.run_names import model_names, task_names, text_name

SLICES: tuple[Literal["by_pairs", "by_length"], ...] = ("by_pairs", "by_length")


def sections_not_in_paper(evidence: Evidence) -> Iterator[Section]:
    """A section each, where there are records."""
    runs = counted(evidence.runs)
    for alike in nearest(in_table_1(runs), lambda run: run.model in KERNEL_ORDER):
        body = heads_body([run for run in alike if run.model in KERNEL_ORDER])
        if body:
            yield Section("Not in the paper: how many heads?", body, "heads")
            break
    every = [*runs, *counted(evidence.found.others)]  # also records of runs that were trained once more
    for alike in nearest(in_table_1(every), lambda run: run.model not in KERNEL_ORDER):
        yield Section("Not in the paper: other norms and kernels", kernels_body(alike), "kernels")
        break
    mixed = [run for run in runs if len(run.settings["task"]["test"]) > 1]
    if mixed:
        yield Section("Not in the paper: longer and fuller sequences", slices_body(mixed), "extrapolation")
    if evidence.text_probes:
        body = text_body([probe for _, probe in evidence.text_probes])
        yield Section("Not in the paper: where language models look", body, "text-attention")


def counted(runs: Sequence[Run]) -> list[Run]:
    """The runs on MQAR that have a result."""
    return [run for run in runs if run.status in COUNTED and run.task == PAPER_TASK]


def in_table_1(runs: Sequence[Run]) -> list[Run]:
    """The runs whose task and width are in Table 1, whatever their kernel."""
    return [run for run in runs if (place := place_of(run)) and place._replace(model="ReBased") in TABLE_1]


def nearest(runs: Sequence[Run], wanted: Callable[[Run], bool]) -> list[list[Run]]:
    """Groups of runs that depart alike from the paper's protocol, heads aside, and of which some are `wanted`; those
    that depart least come first."""
    groups: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        settings = tuple(words for words in departures_of(run) if not words.startswith("heads "))
        groups.setdefault(settings, []).append(run)
    return [groups[key] for key in sorted(groups, key=len) if any(map(wanted, groups[key]))]


def heads_body(runs: Sequence[Run]) -> str:
    """Accuracy by number of heads beside the paper's values; empty if all runs have one number."""
    places = cells_by_heads(build_results(runs, PAPER))
    if not places:
        return ""
    caption = "Dotted: the paper's value, for which it gives no number of heads."
    picture = figure(figures.accuracy_by_heads(places)._replace(name="heads"), caption)
    lead = paragraphs(narrative.heads_verdict(places), protocol_words(runs))
    table = details("Show the numbers", tables.heads_table(places).to_html())
    return lead + picture + table + commands(["rebased sweep heads", "rebased sweep heads-small"])


def kernels_body(runs: Sequence[Run]) -> str:
    """Kernels other than the paper's six, each compared with ReBased: at the widths that they were run at, and with the
    runs of the same bundle, if it has ReBased. On a GPU the same run, trained once more, has another result."""
    papers_heads = [run for run in runs if not any(words.startswith("heads ") for words in departures_of(run))]
    others = [run for run in papers_heads if run.model not in KERNEL_ORDER]
    widths, files = {run.d_model for run in others}, {run.file for run in others}
    wide = [run for run in papers_heads if run.d_model in widths]
    compared = [run for run in wide if run.file in files]
    if not any(run.model == "ReBased" for run in compared):
        compared = list({run.digest: run for run in reversed(wide)}.values())
    results = build_results(compared, PAPER)
    html = paragraphs(protocol_words(compared))
    for family in compare_models(results, "ReBased" if "ReBased" in {m.kind for m in results.models} else None)[-1:]:
        html += paragraphs(narrative.verdict(family)) + tables.comparison_table(family.contrasts).to_html()
    for task in results.tasks:
        html += tables.width_table(results, task).to_html()
    return html + commands(["rebased sweep kernels", "rebased sweep kernels-small"])


def slices_body(runs: Sequence[Run]) -> str:
    """Accuracy by number of pairs and by length, also of sequences unlike those of training."""
    results = build_results(runs, PAPER)
    html = paragraphs(protocol_words(runs))
    for kind in SLICES:
        if any(len(cell.slices(kind)) > 1 for cell in results.cells):
            panels = figures.accuracy_by_slice(results, kind)
            caption = "Mean over seeds in each run's best epoch, on the held-out split if there is one."
            html += figure(panels._replace(name=f"beyond-{panels.name}"), caption)
            html += details("Show the numbers", tables.slice_table(results, kind).to_html())
    return html + commands(["rebased sweep extrapolation", "rebased sweep results/extrapolation-d64/sweep.yaml"])


def text_body(records: Sequence[Probe]) -> str:
    """Attention on the token to be recalled, by distance and by layer."""
    settings = [record["config"] for record in records]
    names = [str(name) for name in model_names(settings, task_names(settings))]
    picture = figure(mass_by_distance(records, names), TEXT)
    table = details("Show every layer", text_table(records, names).to_html())
    again = commands(["rebased probe runs/campaign-enwik8 --json text.json"])
    return paragraphs(text_words(records)) + picture + table + again


def text_words(records: Sequence[Probe]) -> str:
    """Which models were probed, and on how much text."""
    texts = sorted({text_name(record["config"]["data"]) for record in records})
    steps = sorted({record["config"]["train"]["steps"] for record in records})
    low, high = (round(pick(record["parameters"] for record in records) / 1e6) for pick in (min, max))
    size = f"{low} million" if low == high else f"{low} to {high} million"
    seeds = plural(len({record["config"]["train"]["seed"] for record in records}), "seed")
    tokens = ", ".join(sorted({f"{record['ar_tokens']:,}" for record in records}))
    return (
        f"{plural(len(records), 'model')} of {size} parameters, {seeds}, trained for "
        f"{' or '.join(f'{n:,}' for n in steps)} steps on {', '.join(texts)}. {tokens} AR tokens."
    )


def protocol_words(runs: Sequence[Run]) -> str:
    """How many runs, their differences from the paper's settings, and the files they are in."""
    settings = [words for words in departures_of(runs[0]) if not words.startswith("heads ")]
    depart = f"Differences from the paper's settings: {'; '.join(settings)}. " if settings else ""
    seeds = plural(len({run.seed for run in runs}), "seed")
    return f"{plural(len(runs), 'run')}, {seeds}. {depart}Records: {', '.join(sources(runs))}."
