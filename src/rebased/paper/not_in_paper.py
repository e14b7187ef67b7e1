"""What the records show and the paper does not: numbers of heads, other kernels, longer and fuller sequences."""

from collections.abc import Callable, Iterator, Sequence

from rebased.config import grouped, plural
from rebased.paper.evidence import Evidence, Probe
from rebased.paper.mqar import departures_of, sources
from rebased.paper.reference import PAPER, PAPER_TASK, place_of
from rebased.paper.values import KERNEL_ORDER, TABLE_1
from rebased.report.page import Section, details, figure, paragraphs
from rebased.report.probe.figures import mass_by_distance
from rebased.report.probe.page import TEXT
from rebased.report.synthetic import narrative, tables
from rebased.report.synthetic.cells import COUNTED, build_results
from rebased.report.synthetic.comparisons import compare_models
from rebased.report.synthetic.heads import cells_by_heads
from rebased.runs.finished import Run
from rebased.runs.run_names import model_names, task_names


def sections_not_in_paper(evidence: Evidence) -> Iterator[Section]:
    """One section, with a part for each question that there are records of."""
    parts = "".join(details(f"Show {title}", body) for title, body in parts_of(evidence) if body)
    if parts:
        yield Section("Not in the paper", parts, "not-in-the-paper")


def parts_of(evidence: Evidence) -> Iterator[tuple[str, str]]:
    """(what, HTML) of each question."""
    runs = [run for run in evidence.runs if run.status in COUNTED and run.task == PAPER_TASK]
    papers = nearest(in_table_1(runs), lambda run: run.model in KERNEL_ORDER)
    bodies = (heads_body([run for run in alike if run.model in KERNEL_ORDER]) for alike in papers)
    yield "how many heads the paper may have had", next(filter(None, bodies), "")
    again = [run for run in evidence.found.others if run.status in COUNTED and run.task == PAPER_TASK]
    for alike in nearest(in_table_1([*runs, *again]), lambda run: run.model not in KERNEL_ORDER)[:1]:
        yield "other norms and kernels", kernels_body(alike)
    mixed = [run for run in runs if len(run.settings["task"]["test"]) > 1]
    if mixed:
        yield "sequences longer and fuller than in training", slices_body(mixed)
    if evidence.text_probes:
        yield "where language models look", text_body([probe for _, probe in evidence.text_probes])


def in_table_1(runs: Sequence[Run]) -> list[Run]:
    """The runs whose task and width are in Table 1, whatever their kernel."""
    return [run for run in runs if (place := place_of(run)) and place._replace(model="ReBased") in TABLE_1]


def nearest(runs: Sequence[Run], wanted: Callable[[Run], bool]) -> list[list[Run]]:
    """Groups of runs that depart alike from the paper's protocol, heads aside, and of which some are `wanted`; those
    that depart least come first."""
    groups = grouped(runs, lambda run: tuple(word for word in departures_of(run) if not word.startswith("heads ")))
    return [groups[key] for key in sorted(groups, key=len) if any(map(wanted, groups[key]))]


def heads_body(runs: Sequence[Run]) -> str:
    """Accuracy by number of heads beside the paper's values; empty if all runs have one number."""
    places = cells_by_heads(build_results(runs, PAPER))
    if not places:
        return ""
    return paragraphs(narrative.heads_verdict(places), protocol_words(runs)) + tables.heads_table(places).to_html()


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
        html += paragraphs(narrative.verdict(family))
    return html + "".join(tables.width_table(results, task).to_html() for task in results.tasks)


def slices_body(runs: Sequence[Run]) -> str:
    """Accuracy by number of pairs, also of sequences unlike those of training; and what one rate can decide."""
    results = build_results(runs, PAPER)
    html, rates = paragraphs(protocol_words(runs)), {run.lr for run in runs}
    if len(rates) == 1:
        html += paragraphs(
            f"All models have one rate, {min(rates):g}, which suits some of them better than others. Differences "
            "between them are differences at that rate; which model recalls more is not decided."
        )
    return html + tables.slice_table(results, "by_pairs").to_html()


def text_body(records: Sequence[Probe]) -> str:
    """Attention on the token to be recalled, by distance and by layer."""
    settings = [record["config"] for record in records]
    names = [str(name) for name in model_names(settings, task_names(settings))]
    return figure(mass_by_distance(records, names), TEXT)


def protocol_words(runs: Sequence[Run]) -> str:
    """How many runs, their differences from the paper's settings, and the files they are in."""
    settings = [words for words in departures_of(runs[0]) if not words.startswith("heads ")]
    depart = f"Differences from the paper's settings: {'; '.join(settings)}. " if settings else ""
    seeds = plural(len({run.seed for run in runs}), "seed")
    return f"{plural(len(runs), 'run')}, {seeds}. {depart}Records: {', '.join(sources(runs))}."
