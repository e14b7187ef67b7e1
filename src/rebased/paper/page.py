"""The page: five sentences, one plot, the claims, then one section per experiment."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from html import escape

from rebased.config import plural
from rebased.files import without_nan
from rebased.paper.answered import PLANS, with_plans
from rebased.paper.answers import FIRST, forest, main_claims, sentences
from rebased.paper.attention import find_attention
from rebased.paper.contents import EXPERIMENTS, TITLES, Experiment
from rebased.paper.counts import find_counts
from rebased.paper.evidence import PLANNED, Evidence
from rebased.paper.finding import CLAIM_HEAD, Finding, claim_row, tally, words_table
from rebased.paper.gamma import find_gamma
from rebased.paper.kernels import find_kernels
from rebased.paper.planned import OUTCOME_HEAD, JudgedPlan, judge_folders, outcome_row
from rebased.paper.recall import find_recall
from rebased.paper.text import find_perplexity
from rebased.paper.verdict import RULES, VERDICTS
from rebased.report.page import Page, Section, bullets, commands, describe_origin, details, figure, paragraphs
from rebased.report.prose import has_changes, warn_about_records
from rebased.report.tables import Table
from rebased.runs.finished import Run

TITLE = "Does ReBased do what its paper says?"
PAPER = (
    "The paper: Aksenov et al., Linear Transformers with Learnable Kernel Functions are Better In-Context Models, ACL "
    "2024 (arXiv 2402.10644)."
)
PLOT = (
    "Each row is a claim of the paper. Dots: our mean difference with its 95 % interval; grey: earlier runs, which a "
    "planned test has replaced. Crosses: the paper's, with an interval where it prints a spread. To the right of the "
    "dotted line the paper's claim is right."
)
PLANNED_TESTS = (
    "Question, test and margin were written before the runs (results/NAME/plan.md). The records show this where each "
    "commit that the runs name holds the plan. Other tests are marked: order not shown."
)
NOT_SHOWN = "the runs name a commit that does not hold the plan, so the records do not show that it came first"
OTHER_TESTS = "Tests that belong to no table. Those marked as shown only decide nothing."


class PaperPage:
    """Everything that is computed from records about the paper's tables and figures."""

    def __init__(self, evidence: Evidence) -> None:
        self.evidence, self.runs = evidence, [*evidence.runs, *evidence.lm_runs]
        found = [
            *find_kernels(evidence),
            *find_recall(evidence),
            find_gamma(evidence),
            *find_attention(evidence),
            *find_counts(),
            find_perplexity(evidence),
        ]
        by_name = {finding.name: finding for finding in found}
        self.planned = judge_folders(PLANNED) if evidence.shipped else {}
        self.by_name = {name: with_plans(by_name[name], self.planned) for name in TITLES}
        if not evidence.shipped:
            check_relevant(self.findings)
        ended = [run for run in self.runs if run.status != "unfinished"]
        found_once = replace(evidence.found, repeated=0) if evidence.shipped else evidence.found  # it is known of those
        self.warnings = [*warn_about_records(found_once, ended), *evidence.left_out]

    @property
    def findings(self) -> list[Finding]:
        """One per table and figure."""
        return list(self.by_name.values())

    @property
    def answers(self) -> list[str]:
        """The five sentences at the top."""
        return list(sentences(self.by_name, self.planned))

    @property
    def counts(self) -> str:
        """'14 tables and figures of 5 experiments: 2 reproduced, 2 partly, 10 not run'"""
        said = tally([finding.verdict for finding in self.findings], VERDICTS)
        return f"{len(self.findings)} tables and figures of {len(EXPERIMENTS)} experiments: {said}"

    @property
    def provenance(self) -> str:
        """How many runs were made by code that no commit holds."""
        whose = "the records that come with rebased" if self.evidence.shipped else "the records that were given"
        return f"From {whose}: {count_runs(self.runs)}, {plural(len(self.evidence.probes), 'probe')}."

    def marked(self, file: str) -> str:
        """The name of a file, with the number of its runs whose code no commit holds."""
        runs = [run for run in self.runs if run.file == file]
        changed = sum(map(has_changes, runs))
        return f"{file} ({changed} of {plural(len(runs), 'run')} with changes)" if changed else file

    def to_record(self) -> dict[str, object]:
        """Everything as JSON data."""
        planned = {
            name: {"came_first": plan.came_first, "tests": [found.to_record() for found in plan.outcomes]}
            for name, plan in self.planned.items()
        }
        found = {"findings": [finding.to_record() for finding in self.findings], "planned": planned}
        return dict(without_nan({"answers": self.answers, "counts": self.counts, **found}))

    def page(self, command: str) -> Page:
        """The page; `command` is the command that makes it."""
        footer = f"{PAPER} {describe_origin(self.runs) if self.runs else ''}"
        return Page(TITLE, f"{self.counts}. {self.provenance}", list(self._sections(command)), footer, self.to_record())

    def _sections(self, command: str) -> Iterator[Section]:
        yield Section(
            "In five sentences", "<ol>" + "".join(f"<li>{escape(text)}</li>" for text in self.answers) + "</ol>"
        )
        claims = main_claims(self.by_name)
        if (panels := forest(claims)) is not None:
            yield Section("Effects", figure(panels, PLOT))
        if claims:
            table = Table(CLAIM_HEAD, [claim_row(claim, f"{name}. ") for name, claim in claims])
            yield Section("Claims, the most important first", words_table(table))
        yield Section("Verdicts", self._verdicts())
        if self.planned:
            yield Section("Planned tests", self._planned())
        for experiment in EXPERIMENTS:
            yield Section(experiment.title, self._experiment(experiment), experiment.key)
        if self.warnings:
            yield Section("Warnings", bullets(self.warnings))
        yield Section("How verdicts are made", bullets([*RULES, str(self.evidence.precision)]))
        yield Section("How to make this page again", commands([command]))

    def _verdicts(self) -> str:
        """One row per table and figure, together with those of the same experiment."""
        html = ""
        for experiment in EXPERIMENTS:
            link = f'<a href="#{experiment.key}">{escape(experiment.title)}</a>'
            html += f'<tr><th scope="row">{link}</th><td></td><td></td></tr>'
            for finding in (self.by_name[item.name] for item in experiment.items):
                name = f"{escape(finding.name)}: {escape(TITLES[finding.name])}"
                verdict = finding.verdict
                colour = "partly" if verdict == "in small part" else verdict.replace(" ", "-")  # the word says it too
                html += f'<tr><th scope="row">{name}</th><td><span class="verdict {colour}">{verdict}</span></td>'
                shared = self._shared(experiment, finding)
                again = [shared[claim.what] for claim in finding.claims if claim.what in shared]
                once = f" {len(again)} of them, those of {' and '.join(set(again))}, count once." if again else ""
                html += f"<td>{escape(finding.sentence + once)}</td></tr>"
        head = "".join(f'<th scope="col">{word}</th>' for word in ("of the paper", "verdict", "why"))
        table = f'<table class="words stacked"><thead><tr>{head}</tr></thead><tbody>{html}</tbody></table>'
        lead = "Tables and figures of one experiment are computed from the same runs: they are one result, not several."
        return f'{paragraphs(lead)}<div class="wide text">{table}</div>'

    def _shared(self, experiment: Experiment, finding: Finding) -> dict[str, str]:
        """The statements of a table or figure that an earlier one of the experiment makes too, each with its name."""
        earlier = [self.by_name[item.name] for item in experiment.items]
        return {claim.what: one.name for one in earlier[: earlier.index(finding)] for claim in one.claims}

    def _planned(self) -> str:
        """Which plans there are, whether their runs came after them, and what was computed beside their tests."""
        items, rows = [], []
        for name, plan in self.planned.items():
            if not is_tested(plan):
                items.append(f"{name}: {runs_made(plan)}.")
                continue
            known = "the commits that the runs name hold the plan" if plan.came_first else NOT_SHOWN
            about = PLANS.get(name)
            where = f"tests of {about.table}" if about else "tests below"
            items.append(f"{name}: {count_runs(plan.runs)}; {where}; {known}.")
            others = [found for found in plan.outcomes if found.is_shown or about is None]
            rows += [outcome_row(found, f"{name}. ") for found in others]
        html = paragraphs(PLANNED_TESTS) + bullets(items)
        return html + paragraphs(OTHER_TESTS) + words_table(Table(OUTCOME_HEAD, rows)) if rows else html

    def _experiment(self, experiment: Experiment) -> str:
        """What the paper says, departures once, tables and pictures, and the commands."""
        findings = [self.by_name[item.name] for item in experiment.items]
        html = bullets(f"{item.name}: {item.says}" for item in experiment.items)
        departures = dict.fromkeys(words for finding in findings for words in finding.departures)
        kind = "A stand-in" if any(finding.protocol == "stand-in" for finding in findings) else "Departures"
        facts = [f"{kind}: {'; '.join(departures)}."] if departures else []
        facts += [f"The paper leaves open: {experiment.left_open}"] if experiment.left_open else []
        facts += dict.fromkeys(remark for finding in findings for remark in finding.remarks)
        sources = dict.fromkeys(source for finding in findings for source in finding.sources)
        facts += [f"Records: {', '.join(map(self.marked, sources))}."] if sources else []
        html += paragraphs(*facts) + "".join(finding.draw() for finding in findings)
        for finding in findings:
            tables = {finding.unit: finding.number_table()}
            if finding.name not in FIRST:  # their claims stand at the top
                tables["claim"] = finding.claim_table(without=self._shared(experiment, finding))
            for what, table in tables.items():
                if table:
                    html += details(f"Show {finding.name}: {plural(len(table.rows), what)}", words_table(table))
        return html + commands(experiment.redo)


def count_runs(runs: Sequence[Run]) -> str:
    """'5 runs (2 by code with changes that no commit holds)'"""
    changed = sum(map(has_changes, runs))
    return plural(len(runs), "run") + (f" ({changed} by code with changes that no commit holds)" if changed else "")


def is_tested(plan: JudgedPlan) -> bool:
    """Whether all runs of a plan are there."""
    return bool(plan.outcomes) and all(found.answer != "incomplete" for found in plan.outcomes)


def runs_made(plan: JudgedPlan) -> str:
    """'85 of 100 runs made, tested when all are', of the plan's first test."""
    if not plan.outcomes:
        return "no run made"
    first = plan.outcomes[0]
    return f"{sum(first.n)} of {sum(first.test.wanted)} runs made, tested when all are"


def check_relevant(findings: Sequence[Finding]) -> None:
    """ValueError if no record is of anything that the paper shows."""
    if not any(found.remarks or (found.protocol != "none" and found.unit != "count") for found in findings):
        raise ValueError(
            "none of these records has ended and is of an experiment of the paper (MQAR at its lengths and widths, "
            "ReBased as a language model, its probes); `rebased report` shows any runs"
        )
