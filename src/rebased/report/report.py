"""A report over any collection of runs: on synthetic tasks, of language models, or both."""

from collections.abc import Iterator
from typing import Any

from rebased.config import did_you_mean
from rebased.report.drawing import Panels
from rebased.report.lm import LMReport
from rebased.report.lm.models import is_finished
from rebased.report.page import Page, Section, bullets, commands, describe_origin, details
from rebased.report.prose import warn_about_gaps, warn_about_records
from rebased.report.reference_values import NO_VALUES, ReferenceValues
from rebased.report.repeats import code_table, find_repeats, repeat_table, warn_about_repeats
from rebased.report.synthetic import SyntheticReport
from rebased.report.synthetic.cells import COUNTED
from rebased.report.tables import Table
from rebased.runs.collect import Collection
from rebased.runs.finished import no_result

BOTH = "Synthetic tasks and language models"


class Report:
    """Everything that is computed from a collection of runs: one page, its tables, summary and warnings.

    `reference` names the model that the others are compared with, or its kind; ReBased by default. `values` are shown
    beside those of the runs (report/reference_values.py).
    """

    def __init__(self, found: Collection, reference: str | None = None, values: ReferenceValues = NO_VALUES) -> None:
        synthetic = any(run.status in COUNTED for run in found.runs)
        lm = any(map(is_finished, found.lm_runs))
        if not synthetic and not lm:
            warnings = "".join(f"\n{warning}" for warning in warn_about_records(found, []))
            raise ValueError(no_result([*found.runs, *found.lm_runs]) + warnings)
        self.found = found
        self.parts: list[SyntheticReport | LMReport] = [SyntheticReport(found, reference, values)] if synthetic else []
        self.parts += [LMReport(found, reference, values)] if lm else []
        names = set[str]().union(*(part.references for part in self.parts))
        if reference is not None and reference not in names:
            raise ValueError(f"there is no model {reference!r} in these runs; {did_you_mean(reference, sorted(names))}")
        ended = [run for part in self.parts for run in part.ended]
        self.warnings = [*warn_about_records(found, ended), *warn_about_gaps(ended)]
        for part in self.parts:
            about = f"{part.kind}: " if len(self.parts) > 1 else ""
            self.warnings += [f"{about}{warning}" for warning in part.warnings]
        for kind, runs, shown in (
            ("on synthetic tasks", found.runs, synthetic),
            ("of language models", found.lm_runs, lm),
        ):
            if runs and not shown:
                self.warnings.append(f"Runs {kind} are not shown: {no_result(runs)}.")
        self.repeats = find_repeats(found)
        self.warnings += warn_about_repeats(self.repeats)
        self.summary = [sentence for part in self.parts for sentence in part.summary]

    def tables(self) -> dict[str, Table]:
        """The page's tables by file name."""
        return {name: table for part in self.parts for name, table in part.tables().items()}

    def figures(self) -> dict[str, Panels]:
        """The page's figures by file name."""
        return {name: panels for part in self.parts for name, panels in part.figures.items()}

    def page(self, title: str | None, command: str) -> Page:
        """The page. Without a title it is named after its parts; `command` is the command that makes it."""
        data: dict[str, Any] = {}
        for part in self.parts:
            data |= part.data()
        runs = [run for part in self.parts for run in part.runs]
        lead = " ".join(part.lead for part in self.parts)
        own_title = self.parts[0].title if len(self.parts) == 1 else BOTH
        return Page(title or own_title, lead, list(self._sections(command)), describe_origin(runs), data)

    def _sections(self, command: str) -> Iterator[Section]:
        yield Section("Summary", bullets(self.summary))
        if self.warnings:
            yield Section("Warnings", bullets(self.warnings))
        if any(repeat.differing for repeat in self.repeats):
            yield Section("Runs with different results", repeat_table(self.repeats).to_html())
        if codes := code_table([*self.found.runs, *self.found.lm_runs]):
            yield Section("Versions of the code", details("Show the versions", codes.to_html()))
        for part in self.parts:
            yield from part.sections()
        yield Section("How to make this page again", commands([command]))
