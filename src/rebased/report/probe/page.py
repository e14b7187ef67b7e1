"""The page on probes: a pure function of their records."""

from collections import Counter
from collections.abc import Iterator, Sequence
from math import isnan
from statistics import fmean

from rebased.analysis.paired import Verbs, compare_all, in_words
from rebased.config import grouped, plural
from rebased.report.page import Page, Section, bullets, commands, describe_origin, details, figure, paragraphs
from rebased.report.probe import figures, tables
from rebased.report.probe.cells import ProbeCell, Record, group_probes, run_of
from rebased.report.reference_values import NO_VALUES, ReferenceValues, agreement
from rebased.report.tables import Table
from rebased.runs.run_names import model_names, task_names

IOU = (
    "Rows of a matrix are the questions, columns the positions of the pairs. Soft IoU is 1 if all attention is on the "
    "answers. IoU: mean over heads. live heads: over those with an IoU above 0.05. best head: the head with the "
    "highest IoU, chosen on the same examples. mean matrix: the IoU of the heads' mean. ± is the sample standard "
    "deviation over seeds. The layer is the last with a matrix."
)
LOOK = (
    "mass: attention on the answer, as a mean over questions. entropy: of a question's attention over all tokens it "
    "sees, in nats. noisy tokens: wrong tokens with more attention than a uniform share."
)
SMALL = (
    "smallest: the smallest similarity. of the mean: divided by the mean similarity. 1 % below: the weight that 1 % of "
    "all weights are below. The last columns: the share of weights below such a part of the uniform one. The scale of "
    "a similarity cancels, so a weight is compared with the uniform one: what a token would get if all visible tokens "
    "were alike. Based cannot go below 0.5; how small a weight can get then depends on how large the others are. All "
    "numbers are over pairs of a question and a token it sees, and over heads."
)
TEXT = (
    "At each AR token (the bigram that it ends occurred before in the window): the attention on the token that "
    "followed the previous occurrence, which is the token to be recalled. uniform: the weight if all visible tokens "
    "were alike. The best head is the one with the most such attention in its layer; intervals are over windows, 95 %."
)
MAPS = "each model's best head, first seed. Rows: questions; columns: positions of the pairs."
ROW = "Example 1, best head of the first seed: attention of the last question on the positions of the pairs."
SIMILARITY = "Line: similarity divided by its mean. Grey: how often a score occurs in the model of the first seed."
PARABOLAS = (
    "The same similarities against q · k before γ and β. It is no function of q · k alone: "
    "the band holds 80 % of the pairs, the line is the parabola that fits best."
)
HIGHER = Verbs("has a higher IoU than", "has a lower IoU than", "have the same IoU")


class ProbeReport:
    """Everything that is computed from the records of probes: a page, its tables, summary and warnings."""

    def __init__(self, records: Sequence[Record], known: ReferenceValues = NO_VALUES) -> None:
        if not records:
            raise ValueError("there is no probe to show; give folders of runs that are done")
        self.records = list(records)
        self.cells = group_probes([record for record in records if record["kind"] == "task"], known)
        self.texts = [record for record in records if record["kind"] == "text"]
        settings = [record["config"] for record in self.texts]
        self.text_names = [str(name) for name in model_names(settings, task_names(settings))]
        self.summary = [*self._findings(), *self._text_findings()]
        self.warnings = list(self._warnings())

    def tables(self) -> dict[str, Table]:
        """The page's tables by heading."""
        found: dict[str, Table] = {}
        for task, cells in self.by_task().items():
            found[f"Soft IoU of attention and answers: {task}"] = tables.iou_table(cells)
            found[f"Where attention is: {task}"] = tables.look_table(cells)
            if any(tables.similarities(cell) for cell in cells):
                found[f"How near to zero similarities come: {task}"] = tables.similarity_table(cells)
        if self.texts:
            found["Attention on the token to be recalled"] = tables.text_table(self.texts, self.text_names)
        return found

    def by_task(self) -> dict[str, list[ProbeCell]]:
        """The cells of each task."""
        return grouped(self.cells, lambda cell: cell.task)

    def page(self, command: str) -> Page:
        """The page; `command` is the command that makes it."""
        seeds = {record["config"]["train"]["seed"] for record in self.records}
        counts = f"{plural(len(self.records), 'run')}, {plural(len(seeds), 'seed')}"
        lead = f"{counts}. Attention matrices, computed again from queries and keys."
        origin = describe_origin([run_of(record) for record in self.records])
        return Page("Where attention looks", lead, list(self._sections(command)), origin, {"probes": self.records})

    def _sections(self, command: str) -> Iterator[Section]:
        yield Section("Summary", bullets(self.summary))
        if self.warnings:
            yield Section("Warnings", bullets(self.warnings))
        for task, cells in self.by_task().items():
            where = f": {task}" if len(self.by_task()) > 1 else ""
            sources = {c.reference.source: c.known.name for c in cells if "iou" in c.reference.values}
            notes = [IOU, *(f"{name}: {source}" for source, name in sources.items())]
            every = details("Show every run, with intervals over examples", tables.examples_table(cells).to_html())
            body = tables.iou_table(cells).to_html() + paragraphs(*notes) + every
            yield Section(f"Soft IoU of attention and answers{where}", body)
            yield Section(f"Where attention is{where}", tables.look_table(cells).to_html() + paragraphs(LOOK))
            for d_model, alike in by_width(cells).items():
                yield from self._pictures(alike, f"{where}, D = {d_model}")
        if self.texts:
            table = details("Show every layer", tables.text_table(self.texts, self.text_names).to_html())
            picture = figure(figures.mass_by_distance(self.texts, self.text_names), TEXT)
            yield Section("Attention on the token to be recalled", picture + table)
        yield Section("How to make this page again", commands([command]))

    def _pictures(self, cells: Sequence[ProbeCell], where: str) -> Iterator[Section]:
        """Attention maps, the last row, and similarities of the models of one width."""
        body = ""
        for example in range(max(len(cell.layer["drawn"]) for cell in cells)):
            best, mean = (figures.attention_maps(cells, example, which) for which in ("best", "mean"))
            if best and mean:
                body += figure(best, f"Example {example + 1}: {MAPS}") + details("Show the mean over heads", mean)
        if body:
            yield Section(f"Attention maps{where}", body)
        if row := figures.last_rows(cells):
            yield Section(f"The last question{where}", figure(row, ROW))
        if picture := figures.similarity_panels(cells):
            body = figure(picture, SIMILARITY)
            if parabolas := figures.parabola_panels(cells):
                body += figure(parabolas, PARABOLAS)
            table = tables.similarity_table(cells).to_html()
            yield Section(f"Similarity of queries and keys{where}", body + table + paragraphs(SMALL))

    def _findings(self) -> Iterator[str]:
        pairs = contests(self.cells)
        found = compare_all([(one.values("iou"), other.values("iou")) for one, other in pairs])
        for task, cells in self.by_task().items():
            for d_model, here in by_width(cells).items():
                ranked = sorted(here, key=lambda cell: -cell.spread("iou").mean)
                order = ", ".join(f"{cell.model} {cell.spread('iou').mean:.3f}" for cell in ranked)
                yield f"Soft IoU ({task}, D = {d_model}): {order}."
                for (one, other), comparison in zip(pairs, found, strict=True):
                    if one in here:
                        yield in_words(str(one.model), str(other.model), comparison, HIGHER)
                yield from near_zero(here)
        if compared := [(cell, value) for cell in self.cells if (value := cell.reference.values.get("iou"))]:
            outcomes = Counter(agreement(cell.spread("iou"), value) for cell, value in compared)
            yield (
                f"The {compared[0][0].known.name} has an IoU for {len(compared)} of these cells: {outcomes['agrees']} "
                f"agree with it within {compared[0][1].margin:g}, {outcomes['differs']} differ, "
                f"{outcomes['too wide to tell']} are too wide to tell."
            )

    def _text_findings(self) -> Iterator[str]:
        for name, record in zip(self.text_names, self.texts, strict=True):
            best = tables.best_layer(record)
            yield (
                f"{name}, seed {record['config']['train']['seed']}: at {record['ar_tokens']:,} AR tokens, head "
                f"{best['best_head']} of layer {best['layer']} puts {best['best']:.4f} of its attention on the token "
                f"to be recalled; uniform attention would put {record['uniform']:.4f} there."
            )

    def _warnings(self) -> Iterator[str]:
        for reason in dict.fromkeys(record["not_drawn"] for record in self.records if record.get("not_drawn")):
            yield f"No attention maps: {reason}."
        if few := [cell.name for cell in self.cells if cell.accuracy.mean < 0.5]:
            yield f"These models answer less than half of the questions; their attention says little: {', '.join(few)}."
        if any(isnan(cell.spread("iou").sd) for cell in self.cells):
            yield "Some cells have one seed: no spread, and no test between models."


def by_width(cells: Sequence[ProbeCell]) -> dict[int, list[ProbeCell]]:
    """The cells of each width."""
    return grouped(cells, lambda cell: cell.d_model)


def contests(cells: Sequence[ProbeCell]) -> list[tuple[ProbeCell, ProbeCell]]:
    """ReBased and Based of the same task and width that differ in nothing else, where they share a seed."""
    by_name = {(cell.task, cell.d_model, str(cell.model)): cell for cell in cells}
    found = []
    for (task, d_model, name), one in by_name.items():
        other = by_name.get((task, d_model, name.replace("ReBased", "Based", 1)))
        if name.startswith("ReBased") and other and one.records.keys() & other.records.keys():
            found.append((one, other))
    return found


def near_zero(cells: Sequence[ProbeCell]) -> Iterator[str]:
    """How close to zero the similarity comes, and how often."""
    phrases = []
    for cell in cells:
        parts = tables.similarities(cell)
        if parts and cell.model.kind in ("Based", "ReBased"):
            tenth, hundredth = (fmean([part["small"][bound] for part in parts]) for bound in ("0.1", "0.01"))
            least = min(part["least"] / part["mean"] for part in parts)
            shares = f"{tenth:.1%} ({hundredth:.1%})"
            phrases.append(f"{cell.model} {shares}, its smallest similarity is {least:.2g} of the mean")
    if phrases:
        yield f"Weights below a tenth (a hundredth) of the uniform one: {'; '.join(phrases)}."
