"""The page of a suite."""

from collections.abc import Mapping, Sequence

from rebased.analysis.paired import SIGNIFICANT
from rebased.config import plural
from rebased.report.page import Page, Section, bullets, commands, describe_origin, details, figure, finite, paragraphs
from rebased.report.prose import describe_given_up, warn_about_diverged
from rebased.report.suite.board import Board, SuiteCell
from rebased.report.suite.figures import effects_by_task, recall_by_bytes, recall_by_time, timed
from rebased.report.suite.filters import by_task, filters
from rebased.report.suite.sentences import answers, describe_factor, three_sentences
from rebased.report.suite.tables import cell_table, effect_table, recall_table, run_table
from rebased.report.tables import Table, number
from rebased.runs.run_names import sizes_of

BYTES_CAPTION = (
    "Dots are means over fresh seeds on the held-out split, bars are 95 % intervals. Lines join the state sizes of one "
    "mixer. Grey dots are the other mixers: point at one to see which. Mixers without a fixed size stand at the right."
)
PLACE_RULE = (
    "A mixer's place is 1 + the number of mixers that are decidedly better. Every two mixers are compared over all "
    "complete cells of task and state size: runs are exchanged within a cell (a permutation test), with Holm's "
    f"correction over all pairs. Below {SIGNIFICANT:g} a difference is decided. Mixers that share a place cannot be "
    "told apart; they are listed by name."
)
EFFECT_RULE = (
    "Main effects: all pairs of mixers that differ in one factor alone, on the same task and state size. Runs are "
    "exchanged within a pair, with Holm's correction over the factors of a task, for recall and for the share of runs "
    "that began to learn apart. Intervals are all differences that the test does not reject, 95 %, each for itself. "
    "Mixers without a denominator have a norm per head instead, and so have all delta rules: in a suite without the "
    "factor denominator the effect of delta is that of both."
)
UNKNOWN = "Its class is not known here, so neither is the size of its state."
NOT_TIMED = (
    "The training steps were not timed: the command named no mixer, was interrupted, or had a time limit. One that "
    "names mixers, or all, and no time limit (--for) times them."
)
DATA = (
    '<p>Beside this page: <a href="runs.csv">runs.csv</a> has one row per run, for pandas and R '
    '(<code>pandas.read_csv("runs.csv")</code>, <code>read.csv("runs.csv")</code>); <a href="cells.csv">cells.csv</a> '
    'has one row per mixer, task and size of state; <a href="recall-by-bytes.pdf">recall-by-bytes.pdf</a> is the '
    "first figure.</p>"
)


def suite_page(board: Board, name: str, command: str, speeds: Mapping[str, Sequence[float]], where: str) -> Page:
    """The page. `speeds` are milliseconds per 1,000 tokens of a training step by mixer, one per round, on `where`."""
    suite = board.suite
    top = bullets(answers(board)) + figure(recall_by_bytes(board), BYTES_CAPTION)
    sections = [Section("", top), Section("Filter", filters(board))]
    effects = effect_table(board)
    if effects.rows:
        said = [said for factor in board.factors if (said := describe_factor(board, factor, speeds))]
        body = figure(effects_by_task(board), EFFECT_RULE) + bullets(said) + by_task(effects)
        sections.append(Section("What was decided", body))
    for budget in (*suite.state_bytes, None):
        table = recall_table(board, budget)
        if table.rows:
            size = (
                "Mixers whose state has no fixed size" if budget is None else f"Recall with {budget:,} bytes of state"
            )
            sections.append(Section(size, by_task(table), f"size-{budget or 0}"))
    if times := timed(board, speeds):
        caption = (
            f"A training step at the largest state, measured on {where}: milliseconds per 1,000 tokens of the whole "
            "model, the median of rounds in which mixers take turns. Recall is the mean over tasks at that size."
        )
        sections.append(Section("Recall and time", figure(recall_by_time(board, times), caption)))
    elif not speeds and any(cell.scored for cell in board.cells):
        sections.append(Section("Recall and time", paragraphs(NOT_TIMED)))
    sections += [
        Section("The protocol", paragraphs(PLACE_RULE) + bullets(describe_protocol(board))),
        Section("Runs", "".join(show_runs(cell) for cell in board.cells)),
        Section("Data", DATA),
        Section("How to make this page again", commands([command])),
    ]
    counts = f"{plural(len(board.mixers), 'mixer')}, {plural(len(board.runs), 'run')}."
    lead = " ".join(filter(None, [suite.about, counts, board.unfinished]))
    return Page(f"Recall per byte: {name}", lead, sections, describe_origin(board.runs), to_json(board))


def to_json(board: Board) -> dict[str, object]:
    """What was found, for --json."""
    return {
        "sentences": list(three_sentences(board)),
        "protocol": board.suite.protocol,
        "places": board.places,
        "left_out": dict(board.left_out),
        "cells": [
            {
                "mixer": cell.mixer,
                "task": cell.task,
                "state_bytes": cell.budget,
                "rate": cell.rate,
                "recall": cell.values(),
                "began": cell.values("began"),
                "complete": cell.is_complete,
            }
            for cell in board.cells
        ],
        "effects": {
            task: [
                finite({"factor": one.a, "difference": one.effect.difference, "cells": one.cells, "p": one.p})
                for one in board.effects(task)
            ]
            for task in board.suite.tasks
        },
    }


def describe_protocol(board: Board) -> list[str]:
    """Sentences about how the runs were made, and what was left out."""
    suite = board.suite
    any_runs = {cell.task: cell.runs[0] for cell in board.cells}
    seeds = ", ".join(map(str, suite.score_seeds))
    tasks = [
        f"{task}: {sizes_of(run.settings['task'])}, {plural(run.settings['train']['epochs'], 'epoch')} at most; a run "
        f"above {suite.tasks[task].began:g} has begun to learn."
        for task, run in any_runs.items()
    ]
    stages = (
        f"Rates {', '.join(f'{rate:g}' for rate in suite.rates)} are tried with seed "
        f"{', '.join(map(str, suite.choose_seeds))}, for each mixer, task and size of state. The best epoch on the "
        f"validation split (`test`) chooses the rate. Seeds {seeds} are then trained at that rate and scored once on "
        "the held-out split, in the epoch that is best on the validation split."
    )
    sizes = (
        f"The state of the compared layer has at most {' or '.join(f'{size:,}' for size in suite.state_bytes)} bytes "
        "in fp32. The width of its keys (or window, or model width) is the largest that fits. The rest "
        "of the model is the same for all. So parameters cannot be matched too: projections of keys, gates and "
        "convolutions differ in size, and where only the width of the model sets the state (GLA), that differs. Mixers "
        "with a convolution or a gate of their own keep it only where it cannot be switched off (Mamba, Mamba-2)."
    )
    left_out = [f"{plural(count, 'run')} left out: {reason}." for reason, count in board.left_out.items()]
    waiting = [f"{board.unfinished} The others are shown and not ranked."] if board.unfinished else []
    unknown = dict.fromkeys(cell.mixer for cell in board.cells if cell.budget and cell.layer_bytes is None)
    waiting += [f"{mixer}: shown and not ranked. {UNKNOWN}" for mixer in unknown]
    digest = f"The protocol has the digest {suite.protocol}. A run of another protocol is never compared with these."
    ended = [*warn_about_diverged(board.runs), *describe_given_up(board.runs)]
    return [*tasks, stages, sizes, digest, *waiting, *left_out, *ended]


def show_runs(cell: SuiteCell) -> str:
    """The runs of a cell, hidden until the reader opens them."""
    size = "a state without a fixed size" if cell.budget is None else f"{cell.budget:,} bytes"
    chosen = f"rate {cell.rate:g}" if cell.rate else "no rate chosen yet"
    heading = f"{cell.mixer}, {cell.task}, {size}: {chosen}, {plural(len(cell.runs), 'run')}"
    rows = [
        (
            *(run.digest, f"{run.lr:g}", str(run.seed), "score" if run in cell.scored else "choice"),
            *(number(run.best.accuracy), number(run.held_out), str(len(run.epochs))),
        )
        for run in sorted(cell.runs, key=lambda run: (run.seed, run.lr))
    ]
    table = Table(("run", "rate", "seed", "for", "test", "held out", "epochs"), rows)
    runs = details(heading, f'<div id="{cell.anchor}">{table.to_html()}</div>')  # a link to it opens it
    _, mixer, task, size = cell.anchor.split("-")
    return f'<div class="runs of-{mixer} task-{task} size-{size}">{runs}</div>'  # what filters look for


def files_of(board: Board, speeds: Mapping[str, Sequence[float]]) -> dict[str, bytes]:
    """The files beside the page, by name."""
    return {
        "cells.csv": cell_table(board, speeds).to_csv().encode(),
        "runs.csv": run_table(board).to_csv().encode(),
        "recall-by-bytes.pdf": recall_by_bytes(board).to_file("pdf"),
    }
