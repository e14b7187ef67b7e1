"""A report over any collection of runs: on synthetic tasks, of language models, or both."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from rebased.config import did_you_mean, plural
from rebased.report.drawing import Panels, draw_panels
from rebased.report.lm.models import is_finished, measured
from rebased.report.lm.page import LMReport
from rebased.report.page import Page, Section, bullets, commands, describe_origin, details, figure
from rebased.report.prose import warn_about_gaps, warn_about_records
from rebased.report.reference_values import NO_VALUES, ReferenceValues
from rebased.report.synthetic.cells import COUNTED
from rebased.report.synthetic.page import SyntheticReport
from rebased.report.tables import NONE, Table
from rebased.runs.collect import Collection
from rebased.runs.finished import Run, no_result

SCORES = ("test", "valid", "accuracy")  # of an end line: what a run was found to reach


class Repeat(NamedTuple):
    """A run with several records. All have ended."""

    counted: Run  # results are computed from this one
    others: Sequence[Run]

    @property
    def differing(self) -> list[Run]:
        """The other records with other results."""
        return [run for run in self.others if outcome(run) != outcome(self.counted)]


def outcome(run: Run) -> list[Any]:
    """What a run computed, without times and places: equal for two runs that agree to the last digit."""
    lines: list[Any] = [[line["epoch"], line["test"], line.get("held_out")] for line in run.epochs]
    return [*lines, run.status, {key: run.lines[-1].get(key) for key in SCORES}]


def find_repeats(found: Collection) -> list[Repeat]:
    """The runs of which there are several trainings, not only copies of one record."""
    others: dict[str, list[Run]] = {}
    for run in found.others:
        if all(run.lines != other.lines for other in others.get(run.digest, [])):
            others.setdefault(run.digest, []).append(run)
    counted = {run.digest: run for run in (*found.runs, *found.lm_runs)}
    return [Repeat(counted[digest], runs) for digest, runs in others.items()]


def warn_about_repeats(repeats: Sequence[Repeat]) -> Iterator[str]:
    """Sentences about runs that were trained several times: how many agree, and how far the others are apart."""
    differing = sum(bool(repeat.differing) for repeat in repeats)
    if equal := len(repeats) - differing:
        yield f"{plural(equal, 'run')} trained more than once, with equal results."
    if differing:
        yield (
            f"{plural(differing, 'run')} trained more than once, with different results; they are listed below. "
            "One whole record of each counts, chosen by settings and code and never by its result. On a GPU equal runs "
            "drift apart, and chance may decide whether a run begins to learn."
        )


def repeat_table(repeats: Sequence[Repeat]) -> Table:
    """One row per record of the runs whose results differ: what was reached, where, and with which code."""
    rows = [
        (run.digest, run.model, str(run.seed), score(run), counts, run.device, run.code, run.file)
        for repeat in repeats
        if repeat.differing
        for counts, run in [("yes", repeat.counted), *(("no", other) for other in repeat.differing)]
    ]
    return Table(("run", "model", "seed", "result", "counts", "device", "code", "file"), rows)


def score(run: Run) -> str:
    """The result of a run: its best test accuracy, or the test perplexity of a language model."""
    if run.kind.has_epochs:
        return f"{run.best.accuracy:.4f}"
    found = measured(run, "test")
    return f"perplexity {found['all']['perplexity']:.3f}" if found else NONE


BOTH = "Synthetic tasks and language models"
FIRST = 5  # sentences that a page opens with
EFFECTS = (
    "Mean differences of paired seeds with Student's 95 % intervals, not corrected; an interval without 0 is not a "
    "verdict. At most eight per panel: the tables have all. Models that never learned are left out."
)


class Report:
    """Everything that is computed from a collection of runs: one page, its tables, summary and warnings.

    `reference` names the model that the others are compared with, or its kind; ReBased by default. `values` are shown
    beside those of the runs (report/reference_values.py).
    """

    def __init__(self, found: Collection, reference: str | None = None, values: ReferenceValues = NO_VALUES) -> None:
        self.found = found
        self.parts: list[SyntheticReport | LMReport] = []
        hidden = []
        if any(run.status in COUNTED for run in found.runs):
            self.parts.append(SyntheticReport(found, reference, values))
        elif found.runs:
            hidden.append(f"Runs on synthetic tasks are not shown: {no_result(found.runs)}.")
        if any(map(is_finished, found.lm_runs)):
            self.parts.append(LMReport(found, reference, values))
        elif found.lm_runs:
            hidden.append(f"Runs of language models are not shown: {no_result(found.lm_runs)}.")
        if not self.parts:
            raise ValueError("\n".join([no_result([*found.runs, *found.lm_runs]), *warn_about_records(found, [])]))
        names = set[str]().union(*(part.references for part in self.parts))
        if reference is not None and reference not in names:
            raise ValueError(f"there is no model {reference!r} in these runs; {did_you_mean(reference, sorted(names))}")
        ended = [run for part in self.parts for run in part.ended]
        self.warnings = [*warn_about_records(found, ended), *warn_about_gaps(ended)]
        for part in self.parts:
            about = f"{part.kind}: " if len(self.parts) > 1 else ""
            self.warnings += [f"{about}{warning}" for warning in part.warnings]
        self.repeats = find_repeats(found)
        self.warnings += [*hidden, *warn_about_repeats(self.repeats)]
        self.summary = [sentence for part in self.parts for sentence in part.summary]

    def tables(self) -> dict[str, Table]:
        """The page's tables by file name."""
        return {name: table for part in self.parts for name, table in part.tables.items()}

    def figures(self) -> dict[str, Panels]:
        """The page's figures by file name."""
        return {name: panels for part in self.parts for name, panels in part.figures.items()}

    def page(self, title: str | None, command: str) -> Page:
        """The page. Without a title it is named after its parts; `command` is the command that makes it."""
        data = {key: value for part in self.parts for key, value in part.data().items()}
        runs = [run for part in self.parts for run in part.runs]
        lead = " ".join(part.lead for part in self.parts)
        own_title = self.parts[0].title if len(self.parts) == 1 else BOTH
        return Page(title or own_title, lead, list(self._sections(command)), describe_origin(runs), data)

    def _sections(self, command: str) -> Iterator[Section]:
        panels = {heading: draw for part in self.parts for heading, draw in part.effects().items()}
        effects = figure(draw_panels(panels, "effects", "Differences with 95 % intervals"), EFFECTS) if panels else ""
        rest = details(f"Show {plural(len(self.summary) - FIRST, 'more sentence')}", bullets(self.summary[FIRST:]))
        body = bullets(self.summary[:FIRST]) + effects + (rest if self.summary[FIRST:] else "")
        yield Section("", body)
        if self.warnings:
            yield Section("Warnings", bullets(self.warnings))
        if any(repeat.differing for repeat in self.repeats):
            yield Section("Runs with different results", repeat_table(self.repeats).to_html())
        for part in self.parts:
            yield from part.sections()
        yield Section("How to make this page again", commands([command]))
