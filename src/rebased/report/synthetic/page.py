"""The part of a page about synthetic tasks: sections as the data allow, and the same tables for files."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from html import escape
from typing import Any

from rebased.config import grouped, plural
from rebased.report.comparisons import HOW_TO_READ, as_record, effects_panel, notes_on_tests
from rebased.report.drawing import Draw, Panels
from rebased.report.page import Section, details, figure, finite, paragraphs
from rebased.report.reference_values import NO_VALUES, ReferenceValues
from rebased.report.synthetic import figures, narrative, norms, tables
from rebased.report.synthetic.cells import COUNTED, Cell, Results, SliceKind, build_results
from rebased.report.synthetic.comparisons import Family, compare_models
from rebased.report.tables import Table
from rebased.runs.collect import Collection
from rebased.runs.finished import Run

SLICES: dict[SliceKind, str] = {"by_pairs": "by pairs", "by_length": "by length", "slices": "by slice"}
SLICED = "Mean over seeds in each run's best epoch, on the held-out split if there is one."
BUDGET = (
    "The expected accuracy of the best of n learning rates, drawn at random from those that were tried: what a "
    "user who can afford only n tries may expect. Each learning rate counts with its mean over seeds."
)
RESULTS = (
    "lr: the learning rate with the best mean on the test split, of these rates and over these seeds. In a search in "
    "stages these are the first seeds. Rates with fewer seeds are left out. test: the accuracy of the best "
    "epoch on the test split. held out: the accuracy of the same epoch on the held-out split, on which nothing was "
    "chosen."
)
CAPTIONS = {
    "by-width": "Mean over seeds at the chosen learning rate; bars are the sample standard deviation. Points of one "
    "width are shifted sideways a little, to show all of them.",
    "budget": "Drawn with replacement.",
    "by-state": "State: the bytes that a model keeps per sequence to generate the next token, in fp32, after the "
    "task's longest sequence. One point per width.",
    "curves": "At each cell's chosen learning rate: the mean over seeds, and a band from the worst to the best seed. "
    "A run stops when it has solved the task.",
    "by-pairs": SLICED,
    "by-length": SLICED,
}
"""Of the figures, by name."""


class SyntheticReport:
    """Everything that a page and its tables say about the synthetic-task runs of a collection."""

    kind = "Synthetic tasks"
    title = "Accuracy on synthetic tasks"  # the page's heading if it has this part alone

    def __init__(self, found: Collection, reference: str | None = None, known: ReferenceValues = NO_VALUES) -> None:
        self.runs, self.results = found.runs, build_results(found.runs, known)
        self.ended = [run for run in found.runs if run.status in COUNTED]  # the runs whose results count
        self.lead = narrative.lead(found.runs, self.results)
        self.references = {name for model in self.results.models for name in (str(model), model.kind)}
        self.families = compare_models(self.results, reference if reference in self.references else None)
        self.warnings = list(narrative.warnings(found, self.results))
        self.summary = list(narrative.summary(self.results, self.families))

    def data(self) -> dict[str, Any]:
        """Configs, runs, results and comparisons, to be embedded in the page as JSON."""
        return page_data(self.runs, self.results, self.families)

    def effects(self) -> dict[str, Draw]:
        """By heading, panels of the differences: over all widths together if there are several, else at each."""
        contrasts = self.families[0].contrasts if self.families else []
        found = {}
        for task, some in grouped(contrasts, lambda one: one.task).items():
            widths = {one.at for one in some}
            if panel := effects_panel(some, "difference in accuracy"):
                found[", ".join((task, *widths)) if len(widths) == 1 else task] = panel
        return found

    @cached_property
    def tables(self) -> dict[str, Table]:
        """The page's tables by file name."""
        results = self.results
        named = {"results": tables.results_table(results)}
        for task in results.tasks:
            named[f"by_width_{file_name(task)}"] = tables.width_table(results, task)
        for family in self.families:
            named[f"compared_{file_name(family.title).lower()}"] = tables.comparison_table(family.contrasts)
        named["budgets"] = tables.budget_table(results)
        if narrative.some_did_not_learn(results):
            named["not_learned"] = tables.not_learned_table(results)
        for kind in SLICES:
            if any(len(cell.slices(kind)) > 1 for cell in results.cells):
                named[kind] = tables.slice_table(results, kind)
        return named | {"runs": tables.runs_table(self.runs, results)}

    @cached_property
    def figures(self) -> dict[str, Panels]:
        """The page's figures by name."""
        results = self.results
        drawn = [figures.accuracy_by_width(results)] if len(results.widths) > 1 else []
        if figures.tunable(results.cells):
            drawn.append(figures.budgets(results))
        if any(cell.state_bytes for cell in results.cells):
            drawn.append(figures.accuracy_by_state(results))
        if any(run.epochs for cell in results.cells for run in cell.chosen.values()):
            drawn.append(figures.mean_curves(results))
        drawn += [figures.accuracy_by_slice(results, kind) for kind in figures.SLICES if kind in self.tables]
        return {panels.name: panels for panels in drawn}

    def sections(self) -> Iterator[Section]:
        """Accuracy by width, comparisons, figures, all results, all runs."""
        results = self.results
        html = {name: table.folded() for name, table in self.tables.items()}
        drawn = {name: figure(panels, CAPTIONS[name]) for name, panels in self.figures.items()}
        by_task = (
            f"<h3>{escape(task)}</h3>" + self.tables[f"by_width_{file_name(task)}"].to_html() for task in results.tasks
        )
        sources = paragraphs(*narrative.reference_notes(results))
        yield Section("Accuracy by width", drawn.get("by-width", "") + "".join(by_task) + sources)
        for family in self.families:
            table, notes = html[f"compared_{file_name(family.title).lower()}"], narrative.notes_on_table(family)
            how = details(HOW_TO_READ, paragraphs(*notes_on_tests(family.contrasts)))
            body = paragraphs(narrative.verdict(family)) + table + paragraphs(*notes) + how
            yield Section(f"Paired comparisons: {family.title.lower()}", body)
        if "budget" in drawn:
            numbers = details("Show the numbers, with and without replacement", html["budgets"])
            yield Section("Accuracy by tuning budget", paragraphs(BUDGET) + drawn["budget"] + numbers)
        if "by-state" in drawn:
            yield Section("Accuracy by state size", drawn["by-state"] + paragraphs(narrative.without_state(results)))
        if "curves" in drawn:
            yield Section("Learning curves", drawn["curves"])
        if some := narrative.some_did_not_learn(results):
            yield Section("Runs that did not learn", paragraphs(some) + html["not_learned"])
        if shown := norms.cells_with_norms(results):
            yield Section("Gamma and beta of queries and keys", show_norms(shown))
        for kind, words in SLICES.items():
            if kind == "slices" and kind in html:  # names have no place on an axis
                yield Section(f"Accuracy {words}", html[kind] + paragraphs(SLICED))
            elif kind in html:
                numbers = details("Show the numbers", html[kind])
                yield Section(f"Accuracy {words}", drawn[kind.replace("_", "-")] + numbers)
        every = details(f"Show {plural(len(results.cells), 'result')}", html["results"])
        yield Section("All results", paragraphs(RESULTS) + every)
        yield Section("All runs", details(f"Show {plural(len(self.runs), 'run')}", html["runs"]))


def show_norms(by_model: Mapping[str, Sequence[Cell]]) -> str:
    """The body of the section on gamma and beta: one figure per model and width, all but the first hidden."""
    html = ""
    for n, (name, cells) in enumerate(by_model.items()):
        picture = figure(norms.norm_curves(cells, f"norms-{n}"), norms.caption(cells))
        html += details(f"Show {name}", picture) if n else f"<h3>{escape(name)}</h3>{picture}"
    return html


def file_name(text: str) -> str:
    """A text as a file name: 'T = 256, 32 pairs' -> 'T_256_32_pairs'"""
    return re.sub(r"\W+", "_", text).strip("_")


def page_data(runs: Sequence[Run], results: Results, families: Sequence[Family]) -> dict[str, Any]:
    """Configs, runs, results and comparisons. Runs refer to their config by its index; lr and seed are in the run."""
    configs: dict[str, int] = {}
    listed = []
    for run in runs:
        shared = run.settings | {"train": {k: v for k, v in run.settings["train"].items() if k not in ("lr", "seed")}}
        config = configs.setdefault(json.dumps(shared, sort_keys=True), len(configs))
        fields = {key: getattr(run, key) for key in ("digest", "folder", "model", "lr", "seed", "status", "code")}
        listed.append(
            {
                **fields,
                "config": config,
                "device": run.device,
                "parameters": run.parameters,
                "seconds": round(run.seconds, 2),
                "best_epoch": run.best.epoch,
                "test": [round(accuracy, 4) for accuracy in run.accuracies],
                "held_out": run.held_out,
            }
        )
    return {
        "configs": [json.loads(config) for config in configs],
        "runs": listed,
        "results": [result_entry(cell) for cell in results.cells],
        "comparisons": [as_record(contrast) for family in families for contrast in family.contrasts],
    }


def result_entry(cell: Cell) -> dict[str, Any]:
    """A cell as JSON data, with what others report for it by the name of the reference values."""
    value = cell.reference_value
    theirs = {key: getattr(value, key) for key in ("mean", "sd", "at_least", "error")} if value else None
    return {
        "task": cell.task,
        "model": str(cell.model),
        "d_model": cell.d_model,
        "lr": cell.choice.lr,
        "test": finite(cell.test._asdict()),
        "held_out": finite(cell.held_out._asdict()) if cell.held_out else None,
        "lr_means": cell.lr_means,
        **({cell.known.name: theirs} if cell.known.name else {}),
    }
