"""The page: five sentences and one plot, the verdicts, then one section per experiment."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from html import escape

from rebased.config import plural
from rebased.files import without_nan
from rebased.paper.answered import PLANS, same_claims, with_plans
from rebased.paper.answers import FIRST, caveats, forest, main_claims, sentences
from rebased.paper.attention import find_attention
from rebased.paper.contents import EXPERIMENTS, SAYS, Experiment
from rebased.paper.counts import find_counts
from rebased.paper.evidence import PLANNED, Evidence
from rebased.paper.finding import CLAIM_HEAD, Finding, claim_row, words_table
from rebased.paper.gamma import find_gamma
from rebased.paper.kernels import find_kernels
from rebased.paper.planned import OUTCOME_HEAD, JudgedPlan, judge_folders, outcome_row
from rebased.paper.recall import find_recall
from rebased.paper.text import find_perplexity
from rebased.paper.verdict import RULES, VERDICTS
from rebased.report.page import Page, Section, bullets, commands, describe_origin, details, figure, paragraphs
from rebased.report.probe.cells import run_of
from rebased.report.prose import has_changes, warn_about_records
from rebased.report.tables import Table
from rebased.runs.finished import Run

TITLE = "Does ReBased do what its paper says?"
PAPER = (
    "The paper: Aksenov et al., Linear Transformers with Learnable Kernel Functions are Better In-Context Models, ACL "
    "2024 (arXiv 2402.10644)."
)
PLOT = "Dots: ours with 95 % intervals; grey: a planned test replaces it. Right of the dotted line the paper is right."
PLANNED_TESTS = (
    "A plan is results/NAME/plan.md. That it came before its runs is shown where each commit that they name holds it."
)


class PaperPage:
    """Everything that is computed from records about the paper's tables and figures."""

    def __init__(self, evidence: Evidence) -> None:
        self.evidence, self.runs = evidence, [*evidence.runs, *evidence.lm_runs]
        self.planned = judge_folders(PLANNED) if evidence.shipped else {}
        found = [
            *find_kernels(evidence),
            *find_recall(evidence),
            find_gamma(evidence),
            *find_attention(evidence, self.planned),
            *find_counts(),
            find_perplexity(evidence, self.planned),
        ]
        by_name = {finding.name: finding for finding in found}
        self.by_name = {name: with_plans(by_name[name], self.planned) for name in SAYS}
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
        return sentences(self.by_name)

    @property
    def caveats(self) -> list[str]:
        """What limits them, and from which records they are."""
        return [self.provenance, *caveats(self.by_name, self.planned)]

    @property
    def counts(self) -> str:
        """'14 tables and figures of 5 experiments: 2 reproduced (fitted parameter counts), 12 not run'; a verdict that
        several have in one experiment alone names it."""
        verdicts = Counter(finding.verdict for finding in self.findings)
        said = []
        for verdict in (verdict for verdict in VERDICTS if verdicts[verdict]):
            where = [each.title for each in EXPERIMENTS for name in each.items if self.by_name[name].verdict == verdict]
            one = f" (all: {where[0].lower()})" if len(where) > 1 and len(set(where)) == 1 else ""
            said.append(f"{verdicts[verdict]} {verdict}{one}")
        return f"{len(self.findings)} tables and figures: {', '.join(said)}"

    @property
    def provenance(self) -> str:
        """How many runs and probes were made by code that no commit holds."""
        whose = "the records that come with rebased" if self.evidence.shipped else "the records that were given"
        planned = list(self.planned.values())
        asked = {run.digest: run for plan in planned for run in plan.runs}  # several plans may ask for a run
        runs = [*self.runs, *asked.values()]
        probes = [*(probe for _, probe in self.evidence.probes), *(probe for plan in planned for probe in plan.probes)]
        said = f"From {whose}: {counted('run', runs)}, {counted('probe', list(map(run_of, probes)))}."
        return f"{said} Changes: code in no commit."

    def marked(self, file: str) -> str:
        """The name of a file, with the number of its runs or probes whose code no commit holds."""
        found = {"run": [run for run in self.runs if run.file == file]}
        found["probe"] = [run_of(probe) for name, probe in self.evidence.probes if name == file]
        changed = [counted(what, runs) for what, runs in found.items() if any(map(has_changes, runs))]
        return ", ".join([file, *changed])

    def to_record(self) -> dict[str, object]:
        """Everything as JSON data."""
        planned = {
            name: {"came_first": plan.came_first, "tests": [found.to_record() for found in plan.outcomes]}
            for name, plan in self.planned.items()
        }
        found = {"findings": [finding.to_record() for finding in self.findings], "planned": planned}
        return dict(without_nan({"answers": self.answers, "counts": self.counts, "caveats": self.caveats, **found}))

    def page(self, command: str) -> Page:
        """The page; `command` is the command that makes it."""
        footer = f"{PAPER} {describe_origin(self.runs) if self.runs else ''}"
        return Page(TITLE, f"{self.counts}.", list(self._sections(command)), footer, self.to_record())

    def _sections(self, command: str) -> Iterator[Section]:
        claims = main_claims(self.by_name)
        panels = forest(claims)
        html = "<ol>" + "".join(f"<li>{escape(text)}</li>" for text in self.answers) + "</ol>"
        html += (figure(panels, PLOT) if panels else "") + bullets(self.caveats)
        if claims:
            rows = [claim_row(claim, f"{name}. ") for name, claim in claims]
            html += details(f"Show {plural(len(rows), 'claim')}", words_table(Table(CLAIM_HEAD, rows)))
        if self.planned:
            html += details(f"Show {plural(len(self.planned), 'plan')}", self._planned())
        yield Section("", html)
        yield Section("Verdicts", self._verdicts())
        for experiment in EXPERIMENTS:
            yield Section(experiment.title, self._experiment(experiment), experiment.key)
        if self.warnings:
            yield Section("Warnings", bullets(self.warnings))
        rules = bullets([*RULES, str(self.evidence.precision)])
        yield Section("", details("How verdicts are made", rules))
        yield Section("How to make this page again", commands([command]))

    def _verdicts(self) -> str:
        """One row per table and figure, together with those of the same experiment."""
        html = ""
        for experiment in EXPERIMENTS:
            link = f'<a href="#{experiment.key}">{escape(experiment.title)}</a>'
            html += f'<tr><th scope="row">{link}</th><td></td><td></td></tr>'
            for finding in map(self.by_name.__getitem__, experiment.items):
                name = f"{escape(finding.name)}: {escape(SAYS[finding.name])}"
                verdict = finding.verdict
                colour = "partly" if verdict == "in small part" else verdict.replace(" ", "-")  # the word says it too
                html += f'<tr><th scope="row">{name}</th><td><span class="verdict {colour}">{verdict}</span></td>'
                html += f"<td>{escape(finding.sentence)}</td></tr>"
        head = "".join(f'<th scope="col">{word}</th>' for word in ("of the paper", "verdict", "why"))
        table = f'<table class="words stacked"><thead><tr>{head}</tr></thead><tbody>{html}</tbody></table>'
        lead = "Those of one experiment are one result, from the same runs."
        return f'{paragraphs(lead)}<div class="wide text">{table}</div>'

    def _planned(self) -> str:
        """Which plans there are, whether their runs came after them, and what was computed beside their tests."""
        items, rows = [], []
        waiting: dict[str, list[str]] = {}  # names of plans, by how many of their runs are made
        for name, plan in self.planned.items():
            if not is_tested(plan):
                waiting.setdefault(runs_made(plan), []).append(name)
                continue
            about = PLANS.get(name)
            where = f"tests of {about.table}" if about else "tests below"
            items.append(f"{name}: {counted('run', plan.runs)}; {where}; {plan.mark}.")
            claims = self.by_name[about.table].claims if about else []
            for found in plan.outcomes:
                if found.is_shown or about is None or not same_claims(claims, about, found.test):
                    rows.append(outcome_row(found, f"{name}. "))
        items += [f"{', '.join(names)}: {made}." for made, names in waiting.items()]
        html = paragraphs(PLANNED_TESTS) + bullets(items)
        return html + paragraphs("Tests of no claim:") + words_table(Table(OUTCOME_HEAD, rows)) if rows else html

    def _experiment(self, experiment: Experiment) -> str:
        """Departures once, tables and pictures, and the commands."""
        findings = [self.by_name[name] for name in experiment.items]
        departures = dict.fromkeys(words for finding in findings for words in finding.departures)
        kind = "A stand-in" if any(finding.protocol == "stand-in" for finding in findings) else "Departures"
        facts = [f"{kind}: {'; '.join(departures)}."] if departures else []
        facts += [f"The paper leaves open: {experiment.left_open}"] if experiment.left_open else []
        facts += dict.fromkeys(remark for finding in findings for remark in finding.remarks)
        sources = dict.fromkeys(source for finding in findings for source in finding.sources)
        facts += [f"Records: {', '.join(map(self.marked, sources))}."] if sources else []
        html = paragraphs(*facts) + "".join(finding.draw() for finding in findings)
        for finding in findings:
            tables = {finding.unit: finding.number_table()}
            if finding.name not in FIRST:  # their claims stand at the top
                tables["claim"] = finding.claim_table()
            for what, table in tables.items():
                if table:
                    html += details(f"Show {finding.name}: {plural(len(table.rows), what)}", words_table(table))
        return html + commands(experiment.redo)


def counted(what: str, runs: Sequence[Run]) -> str:
    """'5 runs (2 with changes)': by code that no commit holds."""
    changed = sum(map(has_changes, runs))
    return plural(len(runs), what) + (f" ({changed} with changes)" if changed else "")


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
            "no record is a finished run of one of the paper's experiments (MQAR at its lengths and widths, ReBased as "
            "a language model, its probes); `rebased report` shows any runs"
        )
