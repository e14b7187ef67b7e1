"""Sentences about a suite: where a mixer stands, what was decided, what is left to decide, what each factor buys."""

from collections.abc import Iterator, Mapping, Sequence
from math import isfinite, isnan
from statistics import geometric_mean, median

from rebased.analysis.ranking import Contrast, other_of, seeds_to_decide, which_differ_in
from rebased.config import plural
from rebased.report.demo import listed
from rebased.report.prose import warn_about_changes
from rebased.report.suite.board import Board
from rebased.report.suite.tables import UNTUNED

MOST_SEEDS = 100  # a comparison that would need more is not worth its time
NAMED = 2  # mixers that a sentence names
MATCHED = 1.5  # a ratio of parameters below this needs no words
MARGIN = 0.05  # of recall: a smaller difference does not matter
FACTORS = {
    "square": "the square",
    "delta": "the delta rule",
    "gate": "the gate",
    "centred": "centring",
    "denominator": "the denominator",
}
"""How sentences name the factors of our mixers."""
VERBS = ("recalls more on", "recalls less on", "makes no difference that matters on", "is undecided on")


def three_sentences(board: Board) -> tuple[str, str, str]:
    """Where the mixer stands, what was decided, and what it would take to decide the rest."""
    ranked = next((name for name in board.own if name in board.places), None)
    if ranked is not None:
        return place_of(board, ranked), decided_about(board, ranked), what_is_left(board, ranked)
    if board.own:
        unsized = any(cell.budget is None for cell in board.of(board.own[0]))
        rest = "give it a state whose size can be set (state_size)" if unsized else "go on with the same command"
        return without_place(board, board.own[0]), effects_in_words(board), f"To compare it, {rest}."
    return leaders(board), effects_in_words(board), what_is_left(board, None)


def answers(board: Board) -> list[str]:
    """What the page opens with: three sentences, which rates were not tuned, and how many runs nobody can repeat."""
    return [*three_sentences(board), *warn_about_tuning(board), *warn_about_changes(board.runs)]


def warn_about_tuning(board: Board) -> Iterator[str]:
    """A sentence if there are cells in which no run that chose the rate had begun to learn."""
    if untuned := [cell for cell in board.cells if cell.scored and cell.is_untuned]:
        which = named([f"{cell.mixer} ({cell.task}, {cell.layer_bytes or 0:,} B)" for cell in untuned])
        yield (
            f"In {plural(len(untuned), 'cell')} no run that chose the rate began to learn, so the rate was not tuned "
            f"(marked {UNTUNED}): {which}."
        )


def place_of(board: Board, name: str) -> str:
    """The mean recall and the place of a ranked mixer."""
    mean, (low, high) = board.overall(name)
    shared = [other for other, place in board.places.items() if place == board.places[name] and other != name]
    span = "" if isnan(low) else f" (95 % interval {low:.2f} to {high:.2f})"
    cells = plural(len(board.ranked[name]), "cell")
    with_them = f", shared with {named(shared)}" if shared else ""
    return (
        f"{name}{unequal(board, name)} recalls {mean:.2f}{span} on average over {cells} of task and state size: "
        f"place {board.places[name]} of {plural(len(board.places), 'mixer')}{with_them}."
    )


def unequal(board: Board, name: str) -> str:
    """How many times the median of parameters a mixer has, if it has many more or fewer."""
    ratio = board.parameter_ratio(board.of(name)[-1])
    return "" if 1 / MATCHED < ratio < MATCHED else f", with {ratio:.1f} times the median of parameters,"


def without_place(board: Board, name: str) -> str:
    """The recall of a mixer that is not ranked."""
    cells = board.of(name)
    if not cells:
        return f"No cell of {name} is finished yet."
    why = "its state has no fixed size" if cells[0].budget is None else "none of its cells is complete"
    found = [f"{cell.mean:.2f} on {cell.task}" for cell in cells]
    return f"{name} recalls {listed(found)}; it has no place, because {why}."


def leaders(board: Board) -> str:
    """Which mixers share the first place."""
    if not board.places:
        return "No mixer has a complete cell yet."
    best = {name: board.overall(name)[0] for name, place in board.places.items() if place == 1}
    cells, mixers = plural(len(board.ranked[next(iter(best))]), "cell"), plural(len(board.places), "mixer")
    over = f"over {cells} of task and state size"
    if len(best) > NAMED:
        span = f"recall {min(best.values()):.2f} to {max(best.values()):.2f} {over}"
        return f"{len(best)} of {mixers} share the first place: they {span}, and none decidedly more than another."
    means = listed([f"{name} ({mean:.2f})" for name, mean in best.items()])
    return f"{means} {'alone has' if len(best) == 1 else 'share'} the first place among {mixers}, on average {over}."


def decided_about(board: Board, name: str) -> str:
    """Which mixers recall decidedly more or less than this one."""
    mine = [one for one in board.contrasts if name in one[:2]]
    more = [other_of(one, name) for one in mine if one.favours(name)]
    less = [other_of(one, name) for one in mine if one.favours(other_of(one, name))]
    parts = [f"more than {named(more)}"] if more else []
    parts += [f"less than {named(less)}"] if less else []
    if not mine:
        return "No other mixer has these cells."
    if not parts:
        return f"Nothing is decided about it: it differs from none of {plural(len(mine), 'mixer')} by the tests."
    return f"Decided: over all cells it recalls {', and '.join(parts)}."


def effects_in_words(board: Board) -> str:
    """On how many tasks each factor has a decided effect."""
    found = []
    for factor in board.factors:
        effects = [one for task in board.suite.tasks for one in board.effects(task) if one.a == factor]
        tasks, counts = plural(len(effects), "task"), []
        for word, side in (("more", factor), ("less", f"no {factor}")):
            if n := sum(one.favours(side) for one in effects):
                counts.append(f"{word} on {n} of {tasks}")
        found += [f"{FACTORS.get(factor, factor)} recalls {' and '.join(counts)}"] if counts else []
    return f"Decided at equal bytes of state: {', '.join(found)}." if found else "No main effect is decided."


def describe_factor(board: Board, factor: str, speeds: Mapping[str, Sequence[float]]) -> str:
    """What a factor buys, by the planned tests, and what it costs; or which runs are missing to say so. "" if no two
    mixers of the suite differ in it alone."""
    kinds: dict[str, list[str]] = {}
    begun, partial = [], dict[str, list[str]]()
    all_factors = {label: mixer.factors for label, mixer in board.suite.mixers.items()}
    planned = len(which_differ_in(factor, all_factors)) * len(board.suite.state_bytes)
    for task in board.suite.tasks:
        for one in (one for one in board.effects(task) if one.a == factor):
            verb, numbers = verdict_of(one)
            kinds.setdefault(verb, []).append(f"{task} ({numbers})")
            if one.cells < planned:
                partial.setdefault(f"{one.cells} of {planned}", []).append(task)
        decided = (one for one in board.effects(task, "began") if one.a == factor and one.is_decided)
        begun += [f"{task} ({one.effect.difference:+z.2f})" for one in decided]
    if not kinds:
        missing = f"not known yet: of {plural(planned, 'pair')} of cells that differ in it alone none is complete."
        return f"What {FACTORS.get(factor, factor)} buys is {missing}" if planned else ""
    recall = "; ".join(f"{verb} {listed(kinds[verb])}" for verb in VERBS if verb in kinds)
    said = [f"At equal bytes of state {FACTORS.get(factor, factor)} {recall}."]
    said += [f"The share of runs that begin to learn changes on {listed(begun)}."] if begun else []
    if partial:
        counts = (f"{count} on {listed(tasks)}" for count, tasks in partial.items())
        said.append(f"Pairs of cells that are complete: {'; '.join(counts)}.")
    if pairs := which_differ_in(factor, {label: own for label, own in all_factors.items() if label in speeds}):
        rounds = zip(*([x / y for x, y in zip(speeds[a], speeds[b], strict=True)] for a, b in pairs), strict=True)
        ratios = sorted(map(geometric_mean, rounds))
        span = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
        of = f"{plural(len(pairs), 'pair')} of mixers, timed here in {plural(len(ratios), 'round')}"
        if ratios[0] <= 1 <= ratios[-1]:
            said.append(f"Whether a training step takes longer with it is not clear: {span} times as long ({of}).")
        else:
            said.append(f"A training step takes {median(ratios):.2f} times as long with it ({span}; {of}).")
    return " ".join(said)


def what_is_left(board: Board, name: str | None) -> str:
    """How many seeds would decide what is not decided: about one mixer, or about all."""
    open_ = [one for one in board.contrasts if not one.is_decided and (name is None or name in one[:2])]
    if not open_:
        return "All comparisons of two mixers are decided." if board.contrasts else "There is nothing to compare yet."
    seeds, tests = len(board.suite.score_seeds), len(board.contrasts)
    needed = sorted((seeds_to_decide(one, seeds, tests), one) for one in open_)
    said = [
        f"{count:.0f} against {other_of(one, name)}" if name else f"{count:.0f} for {one.a} against {one.b}"
        for count, one in needed
        if count <= MOST_SEEDS
    ]
    out_of_reach = plural(len(open_) - len(said), "comparison")
    if not said:
        return f"To decide the rest: more than {MOST_SEEDS} seeds per cell, for {out_of_reach}; call them equal."
    more = f", and more for {plural(len(said) - NAMED, 'other comparison')}" if len(said) > NAMED else ""
    end = f"; {out_of_reach} would need more than {MOST_SEEDS}" if len(open_) > len(said) else ""
    return f"To decide the rest, instead of {seeds} seeds per cell: about {listed(said[:NAMED])}{more}{end}."


def verdict_of(one: Contrast) -> tuple[str, str]:
    """What the test of a factor on a task says about recall: one of VERBS, and the numbers behind it."""
    (low, high), difference = one.interval, one.effect.difference
    if one.is_decided:
        return VERBS[difference < 0], f"{difference:+z.2f}{', small' if abs(difference) < MARGIN else ''}"
    span = "" if not isfinite(high - low) else f", 95 % interval {low:+z.2f} to {high:+z.2f}"
    return VERBS[2 if low > -MARGIN and high < MARGIN else 3], f"{difference:+z.2f}{span}"


def named(names: Sequence[str]) -> str:
    """Some names in a sentence: at most NAMED of them."""
    more = len(names) - NAMED
    return listed(names if more <= 1 else [*names[:NAMED], f"{more} others"])
