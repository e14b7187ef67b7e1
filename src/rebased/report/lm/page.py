"""The part of a page about language models: sections as the data allow, and the same tables for files."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from html import escape
from typing import Any

from rebased.config import plural
from rebased.report.comparisons import HOW_TO_READ, Difference, as_record, effects_panel, notes_on_tests
from rebased.report.drawing import Draw, Panels
from rebased.report.lm import figures, narrative, tables
from rebased.report.lm.models import LanguageModels, compare_models, curve, group_language_models, kind_in
from rebased.report.page import Section, commands, details, figure, paragraphs
from rebased.report.reference_values import NO_VALUES, ReferenceValues
from rebased.report.tables import Table
from rebased.runs.collect import Collection

PERPLEXITY = (
    "Perplexity is exp of the mean loss per token; lower is better. AR tokens repeat an n-gram that the window has "
    "shown before, so the model can recall them; non-AR tokens are all others. ± is the sample standard deviation over "
    "seeds. tokens/s is the median over the recorded steps; compare it only between runs that had the device to "
    "themselves."
)
BY_DISTANCE = (
    "One line per model: the mean over seeds, in a band from the worst to the best seed. A point at 4 stands for AR "
    "tokens whose bigram was last seen 4 to 7 tokens ago."
)
CURVES = (
    "One line per run, of means over consecutive steps. Dots: the loss on the first windows of the valid split. Where "
    "the dots rise above the line, the model learns the training text by heart."
)
AGAIN = "To train one of these runs again, from the folder that holds it, with the folder of its prepared text:"
LEADS = {
    "Perplexity": paragraphs(PERPLEXITY),
    "Perplexity of AR tokens by distance": paragraphs(narrative.BY_DISTANCE),
    "Perplexity: paired comparisons": "",
    "Training curves": "",
    "Settings of the language models": "",
}
"""The sections, in their order, and what stands above the groups of models in each."""


class LMReport:
    """Everything that a page and its tables say about the language models of a collection."""

    kind = "Language models"
    title = "Perplexity of language models"  # the page's heading if it has this part alone

    def __init__(self, found: Collection, reference: str | None = None, known: ReferenceValues = NO_VALUES) -> None:
        self.runs, self.groups = found.lm_runs, group_language_models(found.lm_runs, known)
        self.ended = [run for group in self.groups for run in group.runs]  # the runs whose results count
        self.lead = narrative.lead(found, self.groups)
        models = {name for group in self.groups for name in group.models}
        self.references = models | {kind_in(name) for name in models}  # what `--reference` may name
        self.differences = [compare_models(group, reference) for group in self.groups]
        self.warnings = list(narrative.warnings(found, self.groups))
        self.summary = list(narrative.summary(self.groups, self.differences))

    def effects(self) -> dict[str, Draw]:
        """By heading, panels of the differences in perplexity on all tokens and on AR tokens."""
        panels = {
            f"{heading} ({group.data})" if len(self.groups) > 1 else heading: effects_panel(
                [one for one in found if one.part == part], "difference in perplexity"
            )
            for group, found in zip(self.groups, self.differences, strict=True)
            for part, heading in (("all", "All tokens"), ("ar", "AR tokens"))
        }
        return {heading: panel for heading, panel in panels.items() if panel}

    @cached_property
    def _tables(self) -> list[dict[str, Table]]:
        return [tables_of(group, found) for group, found in zip(self.groups, self.differences, strict=True)]

    @cached_property
    def tables(self) -> dict[str, Table]:
        """The page's tables by file name; with several groups, numbered from 1."""
        named: dict[str, Table] = {}
        for n, found in enumerate(self._tables, start=1):
            suffix = f"_{n}" if len(self.groups) > 1 else ""
            named |= {f"lm_{what}{suffix}": table for what, table in found.items()}
        names = {run.digest: name for group in self.groups for name, of in group.models.items() for run in of.values()}
        return named | {"lm_runs": tables.runs_table(self.runs, names)}

    @cached_property
    def figures(self) -> dict[str, Panels]:
        """The page's figures by name; groups are numbered from 1."""
        styles, drawn = figures.styles_of(self.groups), list[Panels | None]()
        for n, group in enumerate(self.groups, start=1):
            drawn.append(figures.perplexity_by_distance(group, styles, f"by-distance-{n}"))
            drawn.append(figures.training_curves(group, styles, f"training-{n}"))
        return {panels.name: panels for panels in drawn if panels is not None}

    def sections(self) -> Iterator[Section]:
        """Perplexity, AR tokens by distance, comparisons, training curves, settings, all runs."""
        bodies = [self._bodies(n, group) for n, group in enumerate(self.groups)]
        for heading, lead in LEADS.items():
            html = ""
            for group, found in zip(self.groups, bodies, strict=True):
                if body := found.get(heading):
                    html += (f"<h3>{escape(group.data)}</h3>" if len(self.groups) > 1 else "") + body
            if html:
                yield Section(heading, lead + html)
        again = f"rebased lm train --config {self.runs[0].folder}/config.yaml --data.folder PREPARED_TEXT --out again"
        runs = details(f"Show {plural(len(self.runs), 'run')}", self.tables["lm_runs"].folded())
        yield Section("All runs of language models", runs + paragraphs(AGAIN) + commands([again]))

    def _bodies(self, n: int, group: LanguageModels) -> dict[str, str]:
        html = {what: table.to_html() for what, table in self._tables[n].items()}
        sources = (group.reference(model).source for model in group.models if tables.reference_of(model, group))
        lead, notes = paragraphs(narrative.describe_data(group)), paragraphs(*dict.fromkeys(sources))
        shared = details("Show the settings that all models share", html["settings"])
        found = {
            "Perplexity": lead + html["perplexity"] + notes,
            "Settings of the language models": html.get("settings_by_model", "") + shared,
        }
        if "by_distance" in html:
            picture = figure(self.figures[f"by-distance-{n + 1}"], BY_DISTANCE)
            found["Perplexity of AR tokens by distance"] = html["by_distance"] + picture
        if compared := self.differences[n]:
            found["Perplexity: paired comparisons"] = self._tables[n]["compared"].folded() + details(
                HOW_TO_READ, paragraphs(*notes_on_tests(compared))
            )
        if curves := self.figures.get(f"training-{n + 1}"):
            found["Training curves"] = figure(curves, CURVES)
        return found

    def data(self) -> dict[str, Any]:
        """Configs, results, curves and comparisons, to be embedded in the page as JSON."""
        return {
            "language_models": {
                "runs": [
                    {
                        "folder": run.folder,
                        "status": run.status,
                        "code": run.code,
                        "device": run.device,
                        **{key: run.lines[0].get(key) for key in ("digest", "parameters", "corpus", "config")},
                        **{split: run.lines[-1].get(split) for split in ("valid", "test")},
                        "training_loss": curve(run, "step", "loss"),
                        "valid_perplexity": curve(run, "eval", "perplexity"),
                    }
                    for run in self.runs
                ],
                "comparisons": [
                    {"data": group.data} | as_record(one)
                    for group, found in zip(self.groups, self.differences, strict=True)
                    for one in found
                ],
            }
        }


def tables_of(group: LanguageModels, found: Sequence[Difference]) -> dict[str, Table]:
    """The tables of a group of models and their comparisons."""
    some = {
        "perplexity": tables.perplexity_table(group),
        "by_distance": tables.distance_table(group, tables.with_sd),
        "compared": tables.comparison_table(found) if found else None,
        "settings": tables.settings_table(group, differing=False),
        "settings_by_model": tables.settings_table(group, differing=True) if len(group.models) > 1 else None,
    }
    return {name: table for name, table in some.items() if table}
