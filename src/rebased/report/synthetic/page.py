"""The page itself: sections as the data allow, and the same tables for files."""

import re
from collections.abc import Iterator, Sequence
from html import escape

from rebased.report.page import Page, Section, bullets, commands, describe_origin, details, figure, paragraphs
from rebased.report.synthetic import figures, narrative, tables
from rebased.report.synthetic.cells import SliceKind, build_results
from rebased.report.synthetic.comparisons import Family, compare_models
from rebased.report.synthetic.data import page_data
from rebased.report.synthetic.heads import cells_by_heads
from rebased.report.tables import Table
from rebased.runs.collect import Collection

SLICES: dict[SliceKind, str] = {"by_pairs": "by pairs", "by_length": "by length", "slices": "by slice"}
FEW = 12  # sentences that are read; more are out of the way until asked for
CURVES = (
    "At each cell's chosen learning rate: the mean over seeds, and a band from the worst to the best. "
    "A run stops when it has solved the task."
)
RESULTS = (
    "The learning rate is the one with the best mean over seeds on the test split. test: the best epoch's accuracy "
    "there, the paper's way. held out: the same epoch's, on data that nothing was chosen on."
)
STATE = "What a model must keep of a sequence to go on, in fp32 at the task's longest sequence; a point a width."


class Lab:
    """Everything that is computed from a collection of runs, once."""

    def __init__(self, found: Collection, reference: str | None = None) -> None:
        self.found, self.results = found, build_results(found.runs)
        self.families = compare_models(self.results, reference)
        self.warnings = list(narrative.warnings(found, self.results))
        self.summary = list(narrative.in_short(self.results, self.families))
        self.by_heads = cells_by_heads(self.results)

    def page(self, title: str, command: str) -> Page:
        """`command` is what was typed to make it."""
        return Page(
            title,
            narrative.lead(self.found.runs, self.results),
            list(self.sections(command)),
            describe_origin(self.found.runs),
            page_data(self.found.runs, self.results, self.families),
        )

    def tables(self) -> dict[str, Table]:
        """By name, what a page shows."""
        results = self.results
        named = {"results": tables.results_table(results)}
        for task in results.tasks:
            named[f"by_width_{file_name(task)}"] = tables.width_table(results, task)
        for family in self.families:
            named[f"compared_{file_name(family.title).lower()}"] = tables.comparison_table(family.contrasts)
        named["budgets"] = tables.budget_table(results)
        for kind in SLICES:
            if any(len(cell.slices(kind)) > 1 for cell in results.cells):
                named[kind] = tables.slice_table(results, kind)
        if self.by_heads:
            named["heads"] = tables.heads_table(self.by_heads)
        return named | {"runs": tables.runs_table(self.found.runs)}

    def sections(self, command: str) -> Iterator[Section]:
        results = self.results
        yield Section("In short", bullets(self.summary))
        if self.warnings:
            yield Section("Mind", bullets(self.warnings))
        yield Section("Accuracy by width", self.by_width())
        for family in self.families:
            yield Section(f"How sure? {family.title}", how_sure(family))
        if figures.tunable(results.cells):
            yield Section("With a budget for tuning", self.budgets())
        if any(cell.state_bytes for cell in results.cells):
            sizeless = narrative.without_state(results)
            picture = figure(figures.accuracy_by_state(results), STATE)
            yield Section("Accuracy by state size", picture + (paragraphs(sizeless) if sizeless else ""))
        if any(run.epochs for cell in results.cells for run in cell.chosen.values()):
            yield Section("Learning curves", figure(figures.mean_curves(results), CURVES))
        for kind in SLICES:
            yield from self.slices(kind)
        if self.by_heads:
            caption = "Dotted: the paper's value. Points of one number of heads are moved aside a little."
            picture = figure(figures.accuracy_by_heads(self.by_heads), caption)
            table = tables.heads_table(self.by_heads).to_html()
            yield Section("How many heads?", paragraphs(narrative.heads_verdict(self.by_heads)) + picture + table)
        yield Section("Results in full", paragraphs(RESULTS) + tables.results_table(results).to_html())
        runs = tables.runs_table(self.found.runs).to_html()
        yield Section("Every run", details(f"Show {narrative.plural(len(self.found.runs), 'run')}", runs))
        yield Section("Do it again", commands([command]))

    def by_width(self) -> str:
        """The picture of all tasks, then a table a task."""
        results, html = self.results, ""
        if len(results.widths) > 1:
            caption = (
                "Mean over seeds at the chosen learning rate; bars are the sample standard deviation. So the paper's "
                "Figures 1, 3 and 7 are drawn; here points of one width are moved aside a little, to see them all."
            )
            html += figure(figures.accuracy_by_width(results), caption)
        for task in results.tasks:
            note = narrative.paper_note(results, task)
            html += f"<h3>{escape(task)}</h3>" + tables.width_table(results, task).to_html()
            html += paragraphs(note) if note else ""
        return html

    def budgets(self) -> str:
        lead = paragraphs(
            "The accuracy to expect of the best of so many learning rates, drawn at random from those that were tried: "
            "what a model gives to one who can pay for few tries. Each rate counts with its mean over seeds."
        )
        again = figure(figures.budgets(self.results, True), "Drawn with replacement: the paper's Figure 4, probably.")
        anew = figure(figures.budgets(self.results, False), "Drawn without replacement: every try is a new rate.")
        numbers = tables.budget_table(self.results).to_html()
        return lead + again + details("Show it drawn without replacement, and both in numbers", anew + numbers)

    def slices(self, kind: SliceKind) -> Iterator[Section]:
        if not any(len(cell.slices(kind)) > 1 for cell in self.results.cells):
            return
        heading, table = f"Accuracy {SLICES[kind]}", tables.slice_table(self.results, kind).to_html()
        caption = "Mean over seeds, at each run's best epoch; on the held-out split where there is one."
        if kind == "slices":  # names have no place on an axis
            yield Section(heading, table + paragraphs(caption))
        else:
            picture = figures.accuracy_by_slice(self.results, kind)
            yield Section(heading, figure(picture, caption) + details("Show it in numbers", table))


def file_name(text: str) -> str:
    """'T = 256, 32 pairs' -> 'T_256_32_pairs'"""
    return re.sub(r"\W+", "_", text).strip("_")


def how_sure(family: Family) -> str:
    told: Sequence[str] = list(narrative.sentences(family))
    text = bullets(told) if len(told) <= FEW else details(f"Show {len(told)} sentences", bullets(told))
    table = tables.comparison_table(family.contrasts).to_html()
    return paragraphs(narrative.verdict(family)) + text + table + paragraphs(*narrative.notes_on_tests(family))
