"""What a page of runs says in words: results first, then everything that speaks against believing them."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import isnan
from statistics import fmean

from rebased.analysis import compare_all, in_words, wilcoxon_limit
from rebased.analysis.paired import SIGNIFICANT, equals
from rebased.report.synthetic.cells import COUNTED, Results
from rebased.report.synthetic.comparisons import Family
from rebased.report.synthetic.confounds import Mixture, computed_apart, trained_apart
from rebased.report.synthetic.heads import HeadsByPlace, Nearness, nearness
from rebased.report.synthetic.paper import agrees, deviations, source
from rebased.runs.collect import Collection
from rebased.runs.finished import Run

UNTESTED = "for want of seeds or of spread between them"
TOLD = 8  # models a sentence names; the tables have all


def lead(runs: Sequence[Run], results: Results) -> str:
    counts = {
        "run": len(runs),
        "model": len(results.models),
        "task": len(results.tasks),
        "width": len(results.widths),
        "learning rate": len({run.lr for run in runs}),
        "seed": len({run.seed for run in runs}),
    }
    return ", ".join(plural(count, noun) for noun, count in counts.items()) + "."


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def in_short(results: Results, families: Sequence[Family]) -> Iterator[str]:
    for task in results.tasks:
        yield ranking(results, task)
    for family in families:
        yield verdict(family)
    compared = [(cell, cell.paper) for cell in results.cells if cell.paper]
    if compared:
        near = sum(agrees(cell.test, paper) for cell, paper in compared)
        apart = any(deviations(cell.any_run) for cell, _ in compared)
        settings = " Settings differ from the paper, as told beside its values." if apart else ""
        yield (
            f"The paper has a value for {len(compared)} of these {plural(len(results.cells), 'cell')}. In {near} of "
            "them ours is within two standard errors of it, and what rounding it or reading it off a figure adds; "
            f"where spreads are wide, that is soon said.{settings}"
        )


def ranking(results: Results, task: str) -> str:
    """Who recalls how much, over the widths that all models of the task have."""
    cells = results.of_task(task)
    models = [model for model in results.models if any(cell.model == model for cell in cells)]
    widths = [d for d in results.widths if all(results.find(task, model, d) for model in models)]
    if not widths:
        return f"{task}: no width has all {plural(len(models), 'model')}."
    means = {
        model: fmean(cell.test.mean for cell in cells if cell.model == model and cell.d_model in widths)
        for model in models
    }
    order = sorted(means, key=lambda model: means[model], reverse=True)
    told = ", ".join(f"{model} {means[model]:.3f}" for model in order[:TOLD])
    told += f" and {len(order) - TOLD} more" if len(order) > TOLD else ""
    over = f"mean over D = {', '.join(map(str, widths))}" if len(widths) > 1 else f"D = {widths[0]}"
    return f"{task}: {told} (test accuracy, {over})."


def verdict(family: Family) -> str:
    found = [contrast.found for contrast in family.contrasts]
    ahead = sum(one.t_holm < SIGNIFICANT and one.difference.mean > 0 for one in found)
    behind = sum(one.t_holm < SIGNIFICANT and one.difference.mean < 0 for one in found)
    untested = sum(isnan(one.t_holm) for one in found)
    if untested == len(found):
        return f"{family.title}: {plural(untested, 'comparison')}, and no test, {UNTESTED}."
    none = f", {untested} without a test, {UNTESTED}" if untested else ""
    return (
        f"{family.title}: {family.reference} is ahead in {ahead} and behind in {behind} of "
        f"{plural(len(found), 'comparison')}, {len(found) - ahead - behind - untested} undecided{none} "
        f"({splits_of(family)}; paired t test, Holm p < {SIGNIFICANT:g})."
    )


def splits_of(family: Family) -> str:
    """On which data models were compared."""
    splits = {contrast.split for contrast in family.contrasts}
    named = {"held out": "on held-out data", "test": "on the test split"}
    return named[splits.pop()] if len(splits) == 1 else "on held-out data where both have them"


def sentences(family: Family) -> Iterator[str]:
    several = len({contrast.task for contrast in family.contrasts}) > 1
    for contrast in family.contrasts:
        code = "" if contrast.same_code else " Their runs are of different versions of the code."
        where = f"{contrast.task}, {contrast.at}" if several else contrast.at
        yield f"{where}: {in_words(contrast.reference, contrast.other, contrast.found)}{code}"


def notes_on_tests(family: Family) -> Iterator[str]:
    yield (
        "Differences are paired by seed; ± is their standard deviation. p* is p after Holm's correction over the "
        f"{plural(len(family.contrasts), 'comparison')} of this table, each kind of test for itself. Intervals are "
        "bootstrapped (BCa), and a bit too short for so few seeds. Cohen's d is the mean difference over its standard "
        "deviation, and comes out too large for so few; rank-biserial is 1 where every seed favours the first model."
    )
    splits = {contrast.split for contrast in family.contrasts}
    if "test" in splits:
        yield (
            "Learning rate and epoch were chosen on the test split itself, as in the paper: p values are for "
            "accuracies that were selected for. Runs with task.held_out are compared on that split instead."
        )
    for pairs in sorted({contrast.found.difference.n for contrast in family.contrasts}):
        limit = wilcoxon_limit(pairs)
        if limit:
            yield limit


def heads_verdict(places: HeadsByPlace) -> str:
    near = nearness(places)
    if not near:
        return "The paper has no value for any model here that was run with every number of heads."
    nearest = min(near, key=lambda heads: near[heads].distance)
    told = "; ".join(
        f"{plural(heads, 'head')} {one.distance:.3f}, {one.agree} of {len(one.distances)}"
        for heads, one in near.items()
    )
    return (
        f"Nearest to the paper on average: {plural(nearest, 'head')}. Mean distance from it, and cells within two "
        f"standard errors of it: {told}.{how_much_nearer(near, nearest)}"
    )


def how_much_nearer(near: Mapping[int, Nearness], nearest: int) -> str:
    """Than each other number of heads, paired by cell; one cell can be put to no test."""
    if len(near[nearest].distances) < 2:
        return ""
    others = [heads for heads in near if heads != nearest]
    by_cell = {heads: dict(enumerate(one.distances)) for heads, one in near.items()}
    found = compare_all([(by_cell[heads], by_cell[nearest]) for heads in others])
    parts = [
        f"than {plural(heads, 'head')} by {one.difference.mean:.3f} (Holm p {equals(one.t_holm)})"
        for heads, one in zip(others, found, strict=True)
    ]
    decided = all(one.t_holm < SIGNIFICANT for one in found)
    rest = "" if decided else f" Where p is not below {SIGNIFICANT:g}, these cells do not decide."
    return (
        f" It is nearer {' and '.join(parts)}: paired t tests over cells, which are not independent, so p is too "
        f"small.{rest}"
    )


def without_state(results: Results) -> str | None:
    """Whom the picture of state sizes leaves out."""
    sizeless = dict.fromkeys(str(cell.model) for cell in results.cells if cell.state_bytes is None)
    if not sizeless:
        return None
    return (
        f"Not shown: {', '.join(sizeless)}. Mixers tell the size of their state if they can generate (extend), and "
        "mixers of your own if rebased report knows them (--import)."
    )


def paper_note(results: Results, task: str) -> str | None:
    cells = [cell for cell in results.of_task(task) if cell.paper]
    if not cells:
        return None
    differ = list(dict.fromkeys(text for cell in cells for text in deviations(cell.any_run)))
    how = f"These runs differ from the paper's in {'; '.join(differ)}." if differ else "Settings are the paper's."
    sources = " and ".join(dict.fromkeys(source(cell.any_run) for cell in cells))
    return f"The paper's values are those of {sources}. {how}"


def told(mixture: Mixture) -> str:
    """'precision fp32 (12 runs), bf16 (6 runs); epochs ...'"""
    parts = []
    for key, values in mixture.items():
        counts = (f"{value} ({plural(count, 'run')})" for value, count in values.most_common())
        parts.append(f"{key} {', '.join(counts)}")
    return "; ".join(parts)


def warnings(found: Collection, results: Results) -> Iterator[str]:
    """Everything that a reader must know before believing the rest."""
    codes = Counter(run.code for run in found.runs)
    if len(codes) > 1:
        versions = "; ".join(f"{code}: {plural(count, 'run')}" for code, count in codes.most_common())
        yield f"Runs of {len(codes)} versions of the code are mixed, so a difference may be the code's. {versions}."
    dirty = sum("changes" in code for code in codes)
    if dirty:
        yield f"{plural(dirty, 'version')} of the code had changes that no commit holds."
    if found.damaged_lines:
        where = ", ".join(found.damaged_files[:5]) + (", ..." if len(found.damaged_files) > 5 else "")
        yield f"{plural(found.damaged_lines, 'damaged line')} skipped, in {where}: what they told is missing here."
    if found.nameless:
        yield f"{plural(found.nameless, 'record')} left out for want of a readable first line."
    if found.other:
        yield f"{plural(found.other, 'record')} of something else than a synthetic task left out."
    if found.repeated:
        yield f"{plural(found.repeated, 'record')} of runs that others tell of too; the most complete of each counts."
    if results.repeated:
        yield (
            f"{plural(results.repeated, 'run')} left out: like another in all but how it was computed (device, "
            "micro_batch and such); the first of each counts."
        )
    if unlike := trained_apart(results):
        yield f"Runs set side by side were not trained alike, so a difference may come from that: {told(unlike)}."
    if unlike := computed_apart(results):
        yield f"Runs of one cell were not computed alike, which should not change what they learn: {told(unlike)}."
    open_ended = [run for run in found.runs if run.status not in COUNTED and run.digest not in found.failures]
    for status, count in Counter(run.status for run in open_ended).items():
        yield f"{plural(count, 'run')} {status}: in no result yet, but in the list of all runs."
    ended = {run.digest for run in found.runs if run.status in COUNTED}
    failed = [error for digest, error in found.failures.items() if digest not in ended]
    if failed:
        yield f"{plural(len(failed), 'run')} failed, in no result; the first of them with: {failed[0]}"
    absent = len(found.asked - found.failures.keys() - {run.digest for run in found.runs})
    if absent:
        which = "without a readable record, or not begun yet" if found.nameless else "not begun yet"
        yield f"{plural(absent, 'run')} of a sweep {which}."
    diverged = [run for run in found.runs if run.status == "diverged"]
    if diverged:
        early = sum(not run.epochs for run in diverged)
        yield (
            f"{plural(len(diverged), 'run')} diverged. Each counts with the best accuracy it had reached, as the "
            f"paper's rule has it; {early} of them with 0, before a first epoch had ended."
        )
    uneven = sum(bool(cell.choice.left_out) for cell in results.cells)
    if uneven:
        yield f"In {plural(uneven, 'cell')} some learning rates have fewer seeds than others and could not be chosen."
    lone = sum(cell.test.n == 1 for cell in results.cells)
    if lone:
        yield f"{plural(lone, 'cell')} of {len(results.cells)} with one seed only: no spread, no test."
