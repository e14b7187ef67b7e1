"""The page: a summary with one row per table and figure of the paper, the rules, and one section each."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from html import escape

from rebased.config import plural
from rebased.files import without_nan
from rebased.paper.attention import find_attention
from rebased.paper.contents import ITEMS, NOT_HELD
from rebased.paper.counts import find_counts
from rebased.paper.evidence import Evidence
from rebased.paper.finding import PROTOCOLS, Finding
from rebased.paper.gamma import find_gamma
from rebased.paper.kernels import find_kernels
from rebased.paper.not_in_paper import sections_not_in_paper
from rebased.paper.recall import find_recall
from rebased.paper.text import find_perplexity
from rebased.paper.verdict import MEANINGS, RULES, VERDICTS, Verdict
from rebased.report.page import Page, Section, bullets, commands, describe_origin, details, paragraphs
from rebased.report.prose import warn_about_records
from rebased.report.tables import Table

TITLE = "The paper's tables and figures, and ours beside them"
PAPER = (
    "Aksenov et al., Linear Transformers with Learnable Kernel Functions are Better In-Context Models, ACL 2024 (arXiv "
    "2402.10644)."
)
MANY = 16  # more rows than this are hidden until the reader opens them


class PaperPage:
    """Everything that is computed from records about the paper's tables and figures."""

    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence
        found = [
            *find_kernels(evidence),
            *find_recall(evidence),
            find_gamma(evidence),
            *find_attention(evidence),
            *find_counts(),
        ]
        found.append(find_perplexity(evidence))
        by_name = {finding.item.name: finding for finding in found}
        self.findings = [by_name[item.name] for item in ITEMS]
        if not evidence.shipped:
            check_relevant(self.findings, evidence)
        ended = [run for run in (*evidence.runs, *evidence.lm_runs) if run.status != "unfinished"]
        found_once = replace(evidence.found, repeated=0) if evidence.shipped else evidence.found  # it is known of those
        self.warnings = [*warn_about_records(found_once, ended), *evidence.left_out]

    @property
    def probes(self) -> int:
        """How many probes there are."""
        return len(self.evidence.probes) + len(self.evidence.text_probes)

    @property
    def counts(self) -> str:
        """'14 tables and figures: 2 reproduced, 2 partly, 10 not run'"""
        counted = Counter(finding.verdict for finding in self.findings)
        said = ", ".join(f"{counted[verdict]} {verdict}" for verdict in VERDICTS if counted[verdict])
        return f"{len(self.findings)} tables and figures: {said}"

    def to_record(self) -> dict[str, object]:
        """Everything as JSON data."""
        record: dict[str, object] = without_nan(
            {"counts": self.counts, "findings": [finding.to_record() for finding in self.findings]}
        )
        return record

    def page(self, command: str) -> Page:
        """The page; `command` is the command that makes it."""
        runs = [*self.evidence.runs, *self.evidence.lm_runs]
        whose = "the records that come with rebased" if self.evidence.shipped else "the records that were given"
        lead = f"{self.counts}. From {whose}: {plural(len(runs), 'run')}, {plural(self.probes, 'probe')}."
        origin = describe_origin(runs) if runs else ""
        return Page(TITLE, lead, list(self._sections(command)), f"{PAPER} {origin}", self.to_record())

    def _sections(self, command: str) -> Iterator[Section]:
        items = "".join(f"<li>{badge(verdict)} {escape(words)}</li>" for verdict, words in RULES.items())
        rules = f"<ul>{items}</ul>" + paragraphs(*MEANINGS, str(self.evidence.precision), NOT_HELD)
        yield Section("Summary", summary(self.findings))
        yield Section("How the verdicts are made", rules)
        if self.warnings:
            yield Section("Warnings", bullets(self.warnings))
        for finding in self.findings:
            heading = f"{finding.item.name}: {finding.item.title}"
            yield Section(heading, body(finding), finding.item.key)
        yield from sections_not_in_paper(self.evidence)
        yield Section("How to make this page again", commands([command]))


def check_relevant(findings: Sequence[Finding], evidence: Evidence) -> None:
    """ValueError if no record is of anything that the paper shows, or of a section that the paper does not have."""
    shown = any(finding.protocol != "none" for finding in findings if finding.settings_matter)
    if not shown and not any(True for _ in sections_not_in_paper(evidence)):
        runs = plural(len(evidence.runs) + len(evidence.lm_runs), "run")
        probes = plural(len(evidence.probes) + len(evidence.text_probes), "probe")
        raise ValueError(
            f"none of these {runs} and {probes} has ended and is of an experiment of the paper (MQAR at its lengths "
            "and widths, ReBased as a language model, its probes); `rebased report` shows any runs"
        )


def summary(findings: Sequence[Finding]) -> str:
    """The table at the top: one row per table and figure with a link, its verdict and the reason."""
    head = "".join(f'<th scope="col">{word}</th>' for word in ("of the paper", "verdict", "in one sentence"))
    rows = "".join(
        f'<tr><th scope="row"><a href="#{finding.item.key}">{escape(finding.item.name)}</a>: '
        f"{escape(finding.item.title)}</th><td>{badge(finding.verdict)}</td><td>{escape(finding.sentence)}</td></tr>"
        for finding in findings
    )
    table = f'<table class="words stacked"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'
    return f'<div class="wide text">{table}</div>'


def badge(verdict: Verdict) -> str:
    """A verdict in its colour. The word says it too."""
    return f'<span class="verdict {verdict.replace(" ", "-")}">{verdict}</span>'


def body(finding: Finding) -> str:
    """The section of one table or figure."""
    item = finding.item
    html = f"<p>{badge(finding.verdict)} {escape(finding.sentence)}</p>"
    facts = [("The paper says", item.says), ("Source", f"{item.source}.")]
    facts += [("Left open by the paper", item.left_open)] if item.left_open else []
    if finding.protocol != "none" and finding.settings_matter:
        facts.append(("Protocol of our records", f"{PROTOCOLS[finding.protocol]}; seeds per model: {finding.seeds}."))
    if finding.sources:
        facts.append(("Records", ", ".join(finding.sources)))
    facts += [("Remark", remark) for remark in finding.remarks]
    if finding.cost:
        facts.append(("What is missing would cost", str(finding.cost)))
    html += "<dl>" + "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in facts) + "</dl>"
    html += finding.draw()
    html += checks(finding)
    for other in finding.others:
        names = f"{', '.join(other.sources)}: " if other.sources else ""
        html += details(f"Show records that were not used. {names}{other.sentence}", checks(other))
    missing, claimed = finding.missing_numbers(), finding.missing_claims()
    if missing or claimed:
        shown = (missing.to_html() if missing else "") + (bullets(claimed) if claimed else "")
        html += details("Show what was not run, with the paper's values", shown)
    if finding.settings:
        html += details("Show the paper's protocol beside that of our records", words_table(finding.settings))
    return html + "<p>To do it again, or more of it:</p>" + commands(item.redo)


def checks(finding: Finding) -> str:
    """The tables of numbers and of claims."""
    html, numbers, claims = "", finding.number_table(), finding.claim_table()
    if numbers:
        shown = numbers.to_html()
        html += f"<h3>{escape(finding.unit.capitalize())}s, ours beside the paper's</h3>"
        many = len(numbers.rows) > MANY
        html += details(f"Show {plural(len(numbers.rows), finding.unit)}", shown) if many else shown
    tested = claims.to_html().replace("<table", '<table class="claims"', 1) if claims else ""
    return html + (f"<h3>Claims, tested</h3>{tested}" if tested else "")


def words_table(table: Table) -> str:
    """A table whose cells are words: they stand to the left and may take several lines."""
    return table.to_html().replace('class="wide"><table', 'class="wide text"><table class="words"', 1)
