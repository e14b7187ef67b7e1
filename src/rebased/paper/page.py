"""The page: five sentences, one plot, the claims, then one section per experiment."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from html import escape

from rebased.config import plural
from rebased.files import without_nan
from rebased.paper.answers import forest, main_claims, sentences
from rebased.paper.attention import find_attention
from rebased.paper.contents import EXPERIMENTS, TITLES, Experiment
from rebased.paper.counts import find_counts
from rebased.paper.evidence import PLANNED, Evidence
from rebased.paper.finding import CLAIM_HEAD, Finding, claim_row, tally, words_table
from rebased.paper.gamma import find_gamma
from rebased.paper.kernels import find_kernels
from rebased.paper.not_in_paper import sections_not_in_paper
from rebased.paper.planned import judge_folders, outcome_table
from rebased.paper.recall import find_recall
from rebased.paper.text import find_perplexity
from rebased.paper.verdict import RULES, VERDICTS
from rebased.report.page import Page, Section, bullets, commands, describe_origin, details, figure, paragraphs
from rebased.report.prose import has_changes, warn_about_records
from rebased.report.tables import Table

TITLE = "Does ReBased do what its paper says?"
PAPER = (
    "The paper: Aksenov et al., Linear Transformers with Learnable Kernel Functions are Better In-Context Models, ACL "
    "2024 (arXiv 2402.10644)."
)
PLOT = (
    "Each row is a claim of the paper. Dots: our mean difference with its 95 % interval over seeds. Crosses: the "
    "paper's, with an interval where it prints a spread. To the right of the dotted line the paper's claim is right."
)
BRIEF = (0, 1, 2, 3, 6)  # columns of CLAIM_HEAD in the table that every reader sees


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
        self.by_name = {name: by_name[name] for name in TITLES}
        if not evidence.shipped:
            check_relevant(self.findings, evidence)
        self.planned = judge_folders(PLANNED) if evidence.shipped else {}
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
        changed = sum(map(has_changes, self.runs))
        mark = f" ({changed} by code with changes that no commit holds)" if changed else ""
        probes = len(self.evidence.probes) + len(self.evidence.text_probes)
        whose = "the records that come with rebased" if self.evidence.shipped else "the records that were given"
        return f"From {whose}: {plural(len(self.runs), 'run')}{mark}, {plural(probes, 'probe')}."

    def marked(self, file: str) -> str:
        """The name of a file, with the number of its runs whose code no commit holds."""
        runs = [run for run in self.runs if run.file == file]
        changed = sum(map(has_changes, runs))
        return f"{file} ({changed} of {plural(len(runs), 'run')} with changes)" if changed else file

    def to_record(self) -> dict[str, object]:
        """Everything as JSON data."""
        planned = {name: [found.to_record() for found in outcomes] for name, outcomes in self.planned.items()}
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
            rows = [claim_row(claim) for _, claim in claims]
            named = [(f"{name}. {row[0]}", *row[1:]) for (name, _), row in zip(claims, rows, strict=True)]
            brief = [tuple(row[i] for i in BRIEF) for row in named]
            table = words_table(Table(tuple(CLAIM_HEAD[i] for i in BRIEF), brief))
            more = details("Show p values with other choices", words_table(Table(CLAIM_HEAD, rows)))
            yield Section("Claims, the most important first", table + more)
        yield Section("Verdicts", self._verdicts())
        if self.planned:
            yield Section("Planned tests", self._planned())
        for experiment in EXPERIMENTS:
            yield Section(experiment.title, self._experiment(experiment), experiment.key)
        yield from sections_not_in_paper(self.evidence)
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
                colour, verdict = finding.verdict.replace(" ", "-"), finding.verdict  # the word says it too
                html += f'<tr><th scope="row">{name}</th><td><span class="verdict {colour}">{verdict}</span></td>'
                html += f"<td>{escape(finding.sentence)}</td></tr>"
        head = "".join(f'<th scope="col">{word}</th>' for word in ("of the paper", "verdict", "why"))
        table = f'<table class="words stacked"><thead><tr>{head}</tr></thead><tbody>{html}</tbody></table>'
        lead = "Tables and figures of one experiment are computed from the same runs: they are one result, not several."
        return f'{paragraphs(lead)}<div class="wide text">{table}</div>'

    def _planned(self) -> str:
        """The outcome of each plan."""
        html = paragraphs("Question, test and margin were committed before these runs (results/NAME/plan.md).")
        for name, outcomes in self.planned.items():
            html += f"<h3>{escape(name)}</h3>{words_table(outcome_table(outcomes))}" if outcomes else ""
        waiting = [name for name, outcomes in self.planned.items() if not outcomes]
        return html + (paragraphs(f"Not run yet: {', '.join(waiting)}.") if waiting else "")

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
            if finding.name not in ("Table 1", "Figure 1"):  # their claims stand at the top
                tables["claim"] = finding.claim_table()
            for what, table in tables.items():
                if table:
                    html += details(f"Show {finding.name}: {plural(len(table.rows), what)}", words_table(table))
        return html + commands(experiment.redo)


def check_relevant(findings: Sequence[Finding], evidence: Evidence) -> None:
    """ValueError if no record is of anything that the paper shows, or of a section that the paper does not have."""
    shown = any(finding.remarks or (finding.protocol != "none" and finding.unit != "count") for finding in findings)
    if not shown and not any(True for _ in sections_not_in_paper(evidence)):
        raise ValueError(
            "none of these records has ended and is of an experiment of the paper (MQAR at its lengths and widths, "
            "ReBased as a language model, its probes); `rebased report` shows any runs"
        )
