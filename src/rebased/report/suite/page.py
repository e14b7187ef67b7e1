"""The page of a suite and the tables behind it."""

from collections.abc import Mapping
from math import isnan

from rebased.analysis.paired import SIGNIFICANT, equals
from rebased.analysis.ranking import Contrast
from rebased.config import plural
from rebased.report.page import Page, Section, bullets, commands, describe_origin, details, figure, paragraphs
from rebased.report.suite.board import Board, Outcome, SuiteCell
from rebased.report.suite.figures import recall_by_bytes, recall_by_time, timed
from rebased.report.suite.filters import by_task, filters
from rebased.report.suite.sentences import describe_factor, three_sentences
from rebased.report.synthetic.choices import describe_given_up, warn_about_diverged
from rebased.report.tables import NONE, Number, Table, linked, number
from rebased.runs.run_names import sizes_of

BYTES_CAPTION = (
    "Dots are means over fresh seeds on the held-out split, bars are 95 % intervals. Lines join the state sizes of one "
    "mixer. Grey dots are the other mixers: point at one to see which. Mixers without a set size stand at the right."
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
    "that began to learn apart. Mixers with the delta rule have a norm where the sums have a denominator: the effect "
    "of delta is that of both."
)


NOT_TIMED = "The training steps were not timed, to keep the time of --for: the same command without --for times them."
DATA = (
    '<p>Beside this page: <a href="runs.csv">runs.csv</a> has one row per run, for pandas and R '
    '(<code>pandas.read_csv("runs.csv")</code>, <code>read.csv("runs.csv")</code>); <a href="cells.csv">cells.csv</a> '
    'has one row per mixer, task and size of state; <a href="recall-by-bytes.pdf">recall-by-bytes.pdf</a> is the '
    "first figure.</p>"
)


def suite_page(board: Board, name: str, command: str, speeds: Mapping[str, float], where: str) -> Page:
    """The page. `speeds` are milliseconds per 1,000 tokens of a training step by mixer, measured on `where`."""
    suite = board.suite
    runs = [run for cell in board.cells for run in cell.runs]
    top = figure(recall_by_bytes(board), BYTES_CAPTION) + bullets(three_sentences(board))
    sections = [Section("", top), Section("Filter", filters(board))]
    effects = effect_table(board)
    if effects.rows:
        said = [said for factor in board.factors if (said := describe_factor(board, factor, speeds))]
        body = bullets(said) + by_task(effects) + paragraphs(EFFECT_RULE)
        sections.append(Section("What was decided", body))
    for budget in (*suite.state_bytes, None):
        table = recall_table(board, budget)
        if table.rows:
            size = "Mixers whose state has no set size" if budget is None else f"Recall with {budget:,} bytes of state"
            below = paragraphs(*filter(None, [describe_parameters(board, budget)]))
            sections.append(Section(size, by_task(table) + below, f"state-{budget or 0}"))
    if times := timed(board, speeds):
        caption = (
            f"A training step at the largest state, measured on {where}: milliseconds per 1,000 tokens of the whole "
            "model. Recall is the mean over tasks at that size."
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
    counts = f"{plural(len(board.mixers), 'mixer')}, {plural(len(runs), 'run')}."
    lead = " ".join(filter(None, [suite.about, counts, board.unfinished]))
    return Page(f"Recall per byte: {name}", lead, sections, describe_origin(runs), to_json(board))


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
                {"factor": one.a, "difference": one.effect.difference, "cells": one.cells, "p": p_or_none(one)}
                for one in board.effects(task)
            ]
            for task in board.suite.tasks
        },
    }


def p_or_none(one: Contrast) -> float | None:
    """The p of a contrast, for JSON."""
    return None if isnan(one.p) else one.p


def effect_table(board: Board) -> Table:
    """Two rows per factor, recall and the share of runs that began to learn; one column per task."""
    tasks, rows = list(board.suite.tasks), []
    outcomes: dict[Outcome, str] = {"recall": "recall", "began": "began to learn"}
    for factor in board.factors:
        for outcome, what in outcomes.items():
            found = [next((one for one in board.effects(task, outcome) if one.a == factor), None) for task in tasks]
            if any(found):
                rows.append((factor, what, *(effect_of(one) if one else NONE for one in found)))
    return Table(("factor", "of", *tasks), rows)


def effect_of(one: Contrast) -> Number:
    """The difference that a factor makes, with its interval and p."""
    (low, high), difference = one.effect.interval(), one.effect.difference
    span = "" if isnan(low) else f" ({low:+.2f} to {high:+.2f})"
    p = f"p {equals(one.p)}".replace(" ", "\u00a0")  # on one line, perhaps below the interval
    said = f"{difference:+.2f}{span}".replace(" ", "\u00a0")
    return Number(said if isnan(one.p) else f"{said}, {p}", difference, {"low": low, "high": high, "p": one.p})


def recall_table(board: Board, budget: int | None) -> Table:
    """One row per mixer with this size of state: its place, its recall on each task, bytes and parameters."""
    tasks = list(board.suite.tasks)
    cells = {(cell.mixer, cell.task): cell for cell in board.cells if cell.budget == budget and cell.scored}
    mixers = dict.fromkeys(mixer for mixer, _ in cells)
    order = sorted(mixers, key=lambda mixer: (board.places.get(mixer, len(board.places) + 1), mixer.casefold()))
    rows = []
    for mixer in order:
        found = [cells.get((mixer, task)) for task in tasks]
        some = next(cell for cell in found if cell)
        began = [value for cell in found if cell for value in cell.values("began")]
        rows.append(
            (
                mixer,
                str(board.places.get(mixer, NONE)),
                *(recall_of(cell) if cell else NONE for cell in found),
                f"{sum(began):.0f} of {len(began)}",
                NONE if some.layer_bytes is None else f"{some.layer_bytes:,}",
                f"{some.parameters:,} ({percent(board.parameter_ratio(some))})",
            )
        )
    return Table(("mixer", "place", *tasks, "began to learn", "bytes", "parameters (to the median)"), rows)


def describe_parameters(board: Board, budget: int | None) -> str:
    """By how much parameters differ between the mixers with this size of state, and why."""
    task = next(iter(board.suite.tasks))
    ratios = {
        cell.mixer: board.parameter_ratio(cell) for cell in board.cells if cell.budget == budget and cell.task == task
    }
    if len(ratios) < 2:
        return ""
    least, most = sorted(ratios, key=lambda name: ratios[name])[:: len(ratios) - 1]
    return (
        f"Parameters are not matched: on {task} they differ from the median by {percent(ratios[least])} ({least}) to "
        f"{percent(ratios[most])} ({most}). The protocol below says why."
    )


def percent(ratio: float) -> str:
    """A ratio as a difference: "+12 %"."""
    return f"{round(100 * ratio - 100):+d} %"


def recall_of(cell: SuiteCell) -> Number:
    """The mean of a cell with its interval, linked to its runs."""
    low, high = cell.interval
    span = "" if isnan(low) else f" ({low:.2f} to {high:.2f})"
    few = "" if cell.is_complete else f", {plural(len(cell.scored), 'seed')}"
    found = Number(f"{cell.mean:.2f}{span}{few}", cell.mean, {"low": low, "high": high, "seeds": len(cell.scored)})
    return linked(found, cell.anchor)


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
        f"{', '.join(map(str, suite.choose_seeds))}. The best epoch on the validation split (`test`) chooses the rate. "
        f"Seeds {seeds} are then trained at that rate and scored once on the held-out split, in the epoch that is best "
        "on the validation split."
    )
    sizes = (
        f"The state of the compared layer has at most {' or '.join(f'{size:,}' for size in suite.state_bytes)} bytes "
        "in fp32. The width of its keys (or its window, or what else sets its size) is the largest that fits. The rest "
        "of the model is the same for all. So parameters cannot be matched too: projections of keys, gates and "
        "convolutions differ in size, and where only the width of the model sets the state (GLA), that differs. Mixers "
        "with a convolution or a gate of their own keep it only where it cannot be switched off (Mamba, Mamba-2)."
    )
    left_out = [f"{plural(count, 'run')} left out: {reason}." for reason, count in board.left_out.items()]
    unfinished = sum(not cell.is_complete for cell in board.cells)
    waiting = [f"{plural(unfinished, 'cell')} not complete: shown, not ranked."] if unfinished else []
    runs = [run for cell in board.cells for run in cell.runs]
    return [
        *tasks,
        stages,
        sizes,
        f"The protocol has the digest {suite.protocol}. A run of another protocol is never compared with these.",
        *waiting,
        *left_out,
        *warn_about_diverged(runs),
        *describe_given_up(runs),
    ]


def show_runs(cell: SuiteCell) -> str:
    """The runs of a cell, hidden until the reader opens them."""
    size = "a state without a set size" if cell.budget is None else f"{cell.budget:,} bytes"
    chosen = f"rate {cell.rate:g}" if cell.rate else "no rate chosen yet"
    heading = f"{cell.mixer}, {cell.task}, {size}: {chosen}, {plural(len(cell.runs), 'run')}"
    table = Table(
        ("run", "rate", "seed", "for", "test", "held out", "epochs"),
        [
            (
                run.digest,
                f"{run.lr:g}",
                str(run.seed),
                "score" if run in cell.scored else "choice",
                number(run.best.accuracy),
                number(run.held_out),
                str(len(run.epochs)),
            )
            for run in sorted(cell.runs, key=lambda run: (run.seed, run.lr))
        ],
    )
    runs = details(heading, f'<div id="{cell.anchor}">{table.to_html()}</div>')  # a link to it opens it
    _, mixer, task, size = cell.anchor.split("-")
    return f'<div class="runs of-{mixer} task-{task} size-{size}">{runs}</div>'  # what filters look for


def cell_table(board: Board) -> Table:
    """One row per cell, for a CSV file."""
    head = ("mixer", "task", "state_bytes", "layer_bytes", "place", "rate", "seeds", "recall", "low", "high", "began")
    rows = [
        (
            cell.mixer,
            cell.task,
            NONE if cell.budget is None else str(cell.budget),
            NONE if cell.layer_bytes is None else str(cell.layer_bytes),
            str(board.places.get(cell.mixer, NONE)),
            NONE if cell.rate is None else f"{cell.rate:g}",
            str(len(cell.scored)),
            number(cell.mean),
            *(number(end) for end in cell.interval),
            f"{sum(cell.values('began')):.0f}",
        )
        for cell in board.cells
        if cell.scored
    ]
    return Table(head, rows)


def run_table(board: Board) -> Table:
    """One row per run, for pandas and R: settings, both accuracies, and what the run is for."""
    head = ("suite", "protocol", "mixer", "task", "state_bytes", "rate", "seed", "stage", "test", "held_out", "began")
    rows: list[tuple[str, ...]] = []
    for cell in board.cells:
        for run in cell.runs:
            began = run.best.accuracy > board.suite.tasks[cell.task].began
            rows.append(
                (
                    run.settings["suite"]["name"],
                    board.suite.protocol,
                    cell.mixer,
                    cell.task,
                    NONE if cell.budget is None else str(cell.budget),
                    f"{run.lr:g}",
                    str(run.seed),
                    "score" if run in cell.scored else "choose",
                    number(run.best.accuracy),
                    number(run.held_out),
                    str(int(began)),
                    str(run.parameters),
                    number(run.seconds),
                    run.device,
                    run.digest,
                )
            )
    return Table((*head, "parameters", "seconds", "device", "digest"), rows)


def files_of(board: Board) -> dict[str, bytes]:
    """The files beside the page, by name."""
    return {
        "cells.csv": cell_table(board).to_csv().encode(),
        "runs.csv": run_table(board).to_csv().encode(),
        "recall-by-bytes.pdf": recall_by_bytes(board).to_file("pdf"),
    }
