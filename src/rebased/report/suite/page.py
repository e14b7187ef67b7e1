"""The page of a suite and the tables behind it."""

from collections.abc import Mapping, Sequence
from html import escape
from math import isnan

from rebased.analysis.paired import SIGNIFICANT
from rebased.config import plural
from rebased.report.page import Page, Section, bullets, commands, describe_origin, details, figure, paragraphs
from rebased.report.suite.board import Board, SuiteCell
from rebased.report.suite.figures import recall_by_bytes, recall_by_time, timed
from rebased.report.synthetic.choices import describe_given_up, warn_about_diverged
from rebased.report.tables import NONE, Number, Table, linked, number, p_text
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


def suite_page(board: Board, name: str, command: str, speeds: Mapping[str, float], where: str) -> Page:
    """The page. `speeds` are milliseconds per 1,000 tokens of a training step by mixer, measured on `where`."""
    suite = board.suite
    runs = [run for cell in board.cells for run in cell.runs]
    sections = [Section("", figure(recall_by_bytes(board), BYTES_CAPTION) + bullets(board.sentences))]
    effects = effect_table(board)
    if effects.rows:
        sections.append(Section("What was decided", effects.to_html() + paragraphs(EFFECT_RULE)))
    for budget in (*suite.state_bytes, None):
        table = recall_table(board, budget)
        if table.rows:
            size = "Mixers whose state has no set size" if budget is None else f"Recall with {budget:,} bytes of state"
            sections.append(Section(size, table.to_html()))
    if times := timed(board, speeds):
        caption = (
            f"A training step at the largest state, measured on {where}: milliseconds per 1,000 tokens of the whole "
            "model. Recall is the mean over tasks at that size."
        )
        sections.append(Section("Recall and time", figure(recall_by_time(board, times), caption)))
    sections += [
        Section("The protocol", paragraphs(PLACE_RULE) + bullets(describe_protocol(board))),
        Section("Runs", "".join(show_runs(cell) for cell in board.cells)),
        Section("How to make this page again", commands([command])),
    ]
    lead = f"{suite.about} {plural(len(board.mixers), 'mixer')}, {plural(len(runs), 'run')}."
    return Page(f"Recall per byte: {name}", lead, sections, describe_origin(runs), board.to_json())


def effect_table(board: Board) -> Table:
    """One row per task and factor: the difference of recall, and of the share of runs that began to learn."""
    rows = []
    for task in board.suite.tasks:
        began = {one.a: one for one in board.effects(task, "began")}
        for one in board.effects(task):
            low, high = one.effect.interval()
            learnt = began[one.a]
            verdict = ["recall"] * one.is_decided + ["began to learn"] * learnt.is_decided
            rows.append(
                (
                    task,
                    one.a,
                    number(one.effect.difference, "+.3f"),
                    NONE if isnan(low) else f"{low:+.2f} to {high:+.2f}",
                    p_text(one.p),
                    number(learnt.effect.difference, "+.2f"),
                    p_text(learnt.p),
                    " and ".join(verdict) or "undecided",
                )
            )
    head = ("task", "factor", "recall", "95 % interval", "p", "began to learn", "p of that", "decided")
    return Table(head, rows)


def recall_table(board: Board, budget: int | None) -> Table:
    """One row per mixer with this size of state: its place, its recall on each task, bytes and parameters."""
    tasks = list(board.suite.tasks)
    cells = {(cell.mixer, cell.task): cell for cell in board.cells if cell.budget == budget and cell.scored}
    mixers = dict.fromkeys(mixer for mixer, _ in cells)
    order = sorted(mixers, key=lambda mixer: (board.places.get(mixer, len(board.places) + 1), mixer.casefold()))
    reference = board.parameters(budget)
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
                f"{some.runs[0].parameters:,}" + (f" ({some.runs[0].parameters / reference:.0%})" if reference else ""),
            )
        )
    size = f"parameters (of {board.suite.drawn[0]}'s)" if reference else "parameters"
    return Table(("mixer", "place", *tasks, "began to learn", "bytes", size), rows)


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
        "of the model is the same for all; parameters differ as the tables say. Mixers with a convolution or a gate of "
        "their own keep it only where it cannot be switched off (Mamba, Mamba-2)."
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
    return details(heading, f'<div id="{escape(cell.anchor)}">{table.to_html()}</div>')  # a link to it opens it


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


def files_of(board: Board) -> Sequence[tuple[str, str]]:
    """(name, content) of the files beside the page."""
    return [("cells.csv", cell_table(board).to_csv()), ("runs.csv", run_table(board).to_csv())]
