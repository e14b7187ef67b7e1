"""The leaderboard: accuracy against bytes of state, for every mixer of which a bundle was submitted."""

from collections.abc import Sequence
from math import isnan
from typing import NamedTuple

from rebased.config import plural
from rebased.report.drawing import INK, SERIES, Axes, Draw, Panels, draw_panels, hover, looks
from rebased.report.page import Page, Section, bullets, commands, describe_origin, figure, paragraphs
from rebased.report.prose import warn_about_gaps, warn_about_records
from rebased.report.repeats import find_repeats, repeat_table, warn_about_repeats
from rebased.report.synthetic.cells import Cell, build_results
from rebased.report.synthetic.choices import describe_given_up, rule_of, warn_about_diverged
from rebased.report.synthetic.narrative import nobody_learned
from rebased.report.tables import NONE, Table
from rebased.runs.collect import Collection
from rebased.runs.finished import Run

FIRST_LAYER = "previous_token"  # the fixed first layer of models that are trained to be probed
TITLE = "Recall against bytes of state"
ENOUGH = 3  # seeds that an entry on the frontier must have
RULES = (
    "An entry is a mixer with its settings, at one width on one task. Its accuracy is the mean over seeds at the best "
    "learning rate, in each run's best epoch, on the held-out split if all its runs have one.",
    "State is what a model keeps of one sequence to generate the next token, in fp32, after the task's longest "
    "sequence. For mixers that this code does not know it is what their records say.",
    f"The frontier: no other entry recalls as much with as little state. An entry on it has {ENOUGH} seeds or more. A "
    "task that no model has learned has none. It compares means and tests nothing: entries whose spreads overlap may "
    "change places with other seeds. Tables list the frontier first, then all others, both by accuracy.",
    "Settings may differ between entries (epochs, rates, seeds); the columns say how. Entries made with other versions "
    "of the code are marked.",
)
CAPTION = (
    "Each point is a row of a table below; point at it to see which. A line joins the widths of a mixer. Mixers that "
    "differ only in settings may look alike. The axis of bytes is logarithmic. Thin dots: the frontier."
)
MARKERS = ("o", "s", "^", "D")  # each for as many mixers as there are colours


class Entry(NamedTuple):
    """A cell with what it is ranked by."""

    cell: Cell
    bytes: int | None
    is_first: bool  # on the frontier

    @property
    def accuracy(self) -> float:
        """The mean over seeds."""
        return (self.cell.held_out or self.cell.test).mean


def is_for_probes(run: Run) -> bool:
    """True for models that were trained to be probed: their fixed first layer does a part of the task."""
    return any(mixer["name"] == FIRST_LAYER for mixer in run.settings["model"]["mixers"])


def name_within(cells: Sequence[Cell]) -> Sequence[Cell]:
    """The cells of one task, named by the settings in which they differ there and not on other tasks."""
    return build_results([run for cell in cells for run in cell.all_runs]).cells


def rank(cells: Sequence[Cell], learned: bool = True) -> list[Entry]:
    """The entries of one task: those on the frontier, then the others; within each the best first.

    learned: False if all accuracies are near guessing; then no entry is on the frontier.
    """
    found = [Entry(cell, cell.state_bytes, False) for cell in cells]
    able = [entry for entry in found if learned and entry.bytes is not None and entry.cell.test.n >= ENOUGH]
    marked = [entry._replace(is_first=entry in able and not any(beats(one, entry) for one in able)) for entry in found]
    return sorted(marked, key=lambda entry: (not entry.is_first, -entry.accuracy, entry.bytes or 0))


def beats(one: Entry, other: Entry) -> bool:
    """True if one entry recalls at least as much with at most as much state, and is better in one of both."""
    assert one.bytes is not None
    assert other.bytes is not None
    better = (one.accuracy, -one.bytes) != (other.accuracy, -other.bytes)
    return better and one.accuracy >= other.accuracy and one.bytes <= other.bytes


class Leaderboard:
    """Everything that the page of a leaderboard says. Only runs on synthetic tasks have entries."""

    def __init__(self, found: Collection) -> None:
        if not found.runs:
            raise ValueError("a leaderboard needs runs on synthetic tasks; these are all of language models")
        runs = [run for run in found.runs if not is_for_probes(run)]
        if not runs:
            raise ValueError(f"all of these runs have a fixed first layer ({FIRST_LAYER}), for probes; none is ranked")
        self.found, self.results = found, build_results(runs)
        self.boards = {
            task: rank(name_within(self.results.of_task(task)), self.results.learned(task))
            for task in self.results.tasks
        }
        self.repeats = find_repeats(found)
        ended = [run for cell in self.results.cells for run in cell.all_runs]
        self.code = max(codes, key=codes.count) if (codes := [run.code for run in ended]) else ""
        self.warnings = [
            *warn_about_records(found, ended),
            *warn_about_gaps(ended),
            *warn_about_repeats(self.repeats),
            *describe_given_up(runs),
            *warn_about_diverged(runs),
        ]
        if left_out := len(found.runs) - len(runs):
            self.warnings.append(
                f"{plural(left_out, 'run')} with a fixed first layer ({FIRST_LAYER}), trained for probes: not ranked."
            )

    @property
    def summary(self) -> list[str]:
        """One sentence per task: how many entries there are and which are on the frontier, or that none learned it."""
        sentences = []
        for task, entries in self.boards.items():
            if not self.results.learned(task):
                sentences.append(nobody_learned(self.results, task))
                continue
            first = [entry for entry in entries if entry.is_first]
            frontier = f"{len(first)} on the frontier. The most accurate of these"
            none = "none on the frontier, for which an entry needs three seeds. The most accurate"
            sentences.append(
                f"{task}: {plural(len(entries), 'result')}, {frontier if first else none}: "
                f"{'; '.join(map(describe, (first or entries)[:3]))}."
            )
        return sentences

    def tables(self) -> dict[str, Table]:
        """The table of each task, by its name."""
        return {task: board_table(entries, self.code) for task, entries in self.boards.items()}

    def page(self, title: str | None, command: str) -> Page:
        """The page. `command` is the command that makes it."""
        sections = [Section("Summary", bullets(self.summary))]
        if self.warnings:
            sections.append(Section("Warnings", bullets(self.warnings)))
        if any(entry.bytes for entries in self.boards.values() for entry in entries):
            sections.append(Section("Accuracy by bytes of state", figure(draw_boards(self.boards), CAPTION)))
        sections += [Section(task, table.to_html()) for task, table in self.tables().items()]
        if any(repeat.differing for repeat in self.repeats):
            sections.append(Section("Runs with different results", repeat_table(self.repeats).to_html()))
        sections += [
            Section("Rules", paragraphs(*RULES)),
            Section("How to make this page again", commands([command])),
        ]
        runs = [run for cell in self.results.cells for run in cell.all_runs]
        mixers, tasks = plural(len(self.results.models), "mixer"), plural(len(self.boards), "task")
        lead = f"{mixers} on {tasks}, {plural(len(runs), 'run')}."
        data = {task: {"head": table.head, "rows": table.rows} for task, table in self.tables().items()}
        return Page(title or TITLE, lead, sections, describe_origin(runs), {"leaderboard": data})


def name_of(cell: Cell) -> str:
    """The mixer and its width."""
    return f"{cell.model}, D = {cell.d_model}"


def describe(entry: Entry) -> str:
    """An entry in words."""
    return f"{name_of(entry.cell)}: {entry.accuracy:.3f} with {size(entry.bytes)}"


def size(count: int | None) -> str:
    """Bytes in words."""
    return "a state of unknown size" if count is None else f"{count:,} B"


def board_table(entries: Sequence[Entry], code: str) -> Table:
    """One row per entry. `code` is the version of the code that most runs were made with."""
    rows = []
    for entry in entries:
        cell, chosen = entry.cell, list(entry.cell.chosen.values())
        spread = cell.held_out or cell.test
        others = sorted({run.code for run in chosen} - {code})
        rows.append(
            (
                str(cell.model),
                str(cell.d_model),
                NONE if entry.bytes is None else f"{entry.bytes:,}",
                f"{spread.mean:.3f}" + ("" if isnan(spread.sd) else f" ± {spread.sd:.3f}"),
                "yes" if entry.is_first else NONE,
                str(spread.n),
                "held out" if cell.held_out else "test",
                f"{len(cell.runs)} ({rule_of(cell)})",
                str(max((run.settings["train"].get("epochs", 0) for run in chosen), default=0)),
                f"{cell.any_run.parameters:,}",
                ", ".join(sorted({run.file for run in chosen if run.file})) or NONE,
                ", ".join(others) or "same",
            )
        )
    head = ("mixer", "D", "bytes of state", "accuracy", "frontier", "seeds", "split", "rates", "epochs", "parameters")
    return Table((*head, "file", "code"), rows)


def spaced(values: Sequence[int], apart: float = 1.12) -> list[int]:
    """Some of the values, each at least `apart` times the one before: marks of a logarithmic axis."""
    marks: list[int] = []
    wide = max(apart, (max(values) / min(values)) ** (1 / 6))
    for value in sorted(set(values)):
        if not marks or value >= wide * marks[-1]:
            marks.append(value)
    return marks


def places(entries: Sequence[Entry]) -> tuple[list[int], list[float]]:
    """Where entries stand in the figure: their bytes and their accuracies."""
    return [entry.bytes or 0 for entry in entries], [entry.accuracy for entry in entries]


def draw_boards(boards: dict[str, list[Entry]]) -> Panels:
    """One panel per task: a line per mixer through its widths, and the frontier. Where there are more mixers than
    colours, those that differ only in settings look alike."""
    found = dict.fromkeys(entry.cell.model for entries in boards.values() for entry in entries)
    models = sorted(found, key=lambda model: model.kind != "ReBased")  # which has the first colour
    labels = {model: model.kind if len(models) > len(SERIES) else str(model) for model in models}
    styles = {
        label: look | {"marker": MARKERS[i // len(SERIES) % len(MARKERS)]}
        for i, (label, look) in enumerate(zip(dict.fromkeys(labels.values()), looks(), strict=False))
    }

    def panel(entries: Sequence[Entry]) -> Draw:
        def draw(axes: Axes) -> None:
            sized = sorted((each for each in entries if each.bytes), key=lambda each: (each.bytes or 0, each.accuracy))
            for model, label in labels.items():
                if own := [entry for entry in sized if entry.cell.model == model]:
                    axes.plot(*places(own), **styles[label], label=label)
            hover(axes, *places(sized), [describe(entry) for entry in sized])
            if first := [entry for entry in sized if entry.is_first]:
                axes.step(*places(first), where="post", color=INK, lw=1, ls=":", label="frontier")
            axes.set(xscale="log", xlabel="KiB of state", ylabel="accuracy", ylim=(-0.03, 1.03))
            marks = spaced(places(sized)[0])
            axes.set_xticks(marks, [f"{mark / 1024:.3g}" for mark in marks])
            axes.minorticks_off()

        return draw

    shown = {task: panel(entries) for task, entries in boards.items() if any(entry.bytes for entry in entries)}
    return draw_panels(shown, "leaderboard", "Accuracy by bytes of state")
