"""Sentences about runs on synthetic tasks: results, and what to know before believing them."""

from collections import Counter
from collections.abc import Iterator, Sequence, Sized
from math import isnan
from statistics import fmean

from rebased.analysis.paired import SIGNIFICANT, equals
from rebased.config import grouped, plural
from rebased.report.comparisons import difference_of
from rebased.report.prose import describe_given_up, warn_about_code, warn_about_diverged, warn_about_open_runs
from rebased.report.reference_values import MARGIN, agreement
from rebased.report.synthetic.cells import COUNTED, LEARNED, Results, has_learned, order_of
from rebased.report.synthetic.comparisons import Family
from rebased.report.synthetic.confounds import (
    Confounds,
    execution_confounds,
    training_confounds,
    warn_about_short_training,
)
from rebased.runs.collect import Collection
from rebased.runs.finished import Run

UNTESTED = "one seed, or no spread between seeds"
NAMED, FEW = 8, 3  # models that a ranking and a verdict name; the tables have all


def lead(runs: Sequence[Run], results: Results) -> str:
    """'16 runs, 2 models, 1 task, ...'"""
    counts: dict[str, Sized] = {"run": runs, "model": results.models, "task": results.tasks, "width": results.widths}
    counts |= {"learning rate": {run.lr for run in runs}, "seed": {run.seed for run in runs}}
    return ", ".join(plural(len(some), noun) for noun, some in counts.items()) + "."


def summary(results: Results, families: Sequence[Family]) -> Iterator[str]:
    """The main results: one ranking per task, one verdict per family, and how many cells agree with others. Before
    them stands a warning about runs that ended too early."""
    if short := warn_about_short_training(chosen_runs(results)):
        yield short
    for task in results.tasks:
        yield ranking(results, task) if results.learned(task) else nobody_learned(results, task)
    yield from map(verdict, families[:1])  # all of them stand above their tables
    if not families and len(results.models) > 1 and any(map(results.learned, results.tasks)):
        yield (
            "Nothing is compared: no two models have runs on the same task with the same width and seed. Train them "
            "so, for example as a sweep over models."
        )
    known = [(cell, value) for cell in results.cells if (value := cell.reference_value)]
    compared = [(cell, value) for cell, value in known if not cell.reference.limit] or known
    if compared:
        name = results.known.name
        outcomes = Counter(agreement(cell.test, value) for cell, value in compared)
        left = len(known) - len(compared)
        limits = dict.fromkeys(cell.reference.limit for cell, _ in known if cell.reference.limit)
        others = f", not counting {left} with {' or '.join(limits)}" if left else ""
        yield (
            f"The {name} has a value for {len(compared)} of these {plural(len(results.cells), 'cell')}{others}: "
            f"{outcomes['agrees']} agree within {MARGIN:g} by two one-sided tests, {outcomes['differs']} differ, "
            f"{outcomes['too wide to tell']} are too wide to tell."
        )


def chosen_runs(results: Results) -> list[tuple[str, Run]]:
    """The runs that accuracies are of, each with the name of its model. A task that no model learned has none: it is
    not ranked."""
    cells = [cell for cell in results.cells if results.learned(cell.task)]
    return [(str(cell.model), run) for cell in cells for run in cell.chosen.values()]


def ranking(results: Results, task: str) -> str:
    """The models of a task by mean accuracy, over the widths that all of them have."""
    models = grouped(results.of_task(task), lambda cell: cell.model)
    widths = sorted(set.intersection(*({cell.d_model for cell in cells} for cells in models.values())))
    if not widths:
        return f"{task}: there is no width at which all {plural(len(models), 'model')} were run."
    means = {
        model: fmean(cell.test.mean for cell in cells if cell.d_model in widths) for model, cells in models.items()
    }
    order = sorted(means, key=lambda model: means[model], reverse=True)
    named = ", ".join(f"{model} {means[model]:.3f}" for model in order[:NAMED])
    named += f" and {len(order) - NAMED} more" if len(order) > NAMED else ""
    over = f"mean over D = {', '.join(map(str, widths))}" if len(widths) > 1 else f"D = {widths[0]}"
    return f"{task}: {named} (test accuracy, {over})."


def nobody_learned(results: Results, task: str) -> str:
    """That no model learned a task, with the best accuracy and that of guessing. It is no ranking."""
    runs = [run for cell in results.of_task(task) for run in cell.all_runs]
    best = max(run.best.accuracy for run in runs)
    return (
        f"{task}: no model learned this task. The best of {plural(len(runs), 'run')} has test accuracy {best:.3f}, and "
        f"guessing gives {runs[0].chance:.2g}; less than {LEARNED:g} above guessing counts as not learned. So models "
        "are not ranked or compared. Train longer (train.epochs), on more examples, or at another learning rate."
    )


def some_did_not_learn(results: Results) -> str:
    """How many runs did not learn a task that others learned, by model; "" if all learned it."""
    learned = [cell for cell in results.cells if results.learned(cell.task)]
    by_model = grouped(sorted(learned, key=lambda cell: order_of(cell.model)), lambda cell: str(cell.model))
    runs = {model: [run for cell in cells for run in cell.all_runs] for model, cells in by_model.items()}
    counts = {model: sum(not has_learned(run) for run in some) for model, some in runs.items()}
    if not any(counts.values()):
        return ""
    order = sorted(counts, key=lambda model: counts[model] / len(runs[model]), reverse=True)
    listed = ", ".join(f"{model} {counts[model]} of {len(runs[model])}" for model in order)
    return (
        f"{sum(counts.values())} of {plural(sum(map(len, runs.values())), 'run')} did not learn: their best test "
        f"accuracy is less than {LEARNED:g} above guessing, while other runs learned the task. A mean over seeds "
        f"depends on how many of these it has. Over all widths and learning rates: {listed}. Models need not have "
        "been run at the same ones, and runs of one seed are not independent; the table has them apart."
    )


def verdict(family: Family) -> str:
    """How many comparisons of a family the reference wins, loses, or leaves undecided."""
    found = family.contrasts
    ahead, behind = (sum(one.favours == sign for one in found) for sign in (1, -1))
    dead = sum(not one.learned for one in found)
    untested = sum(one.learned and isnan(one.found.t_holm) for one in found)
    if untested == len(found):
        return f"{family.title}: {plural(untested, 'comparison')}, none of them tested ({UNTESTED})."
    none = f", {untested} not tested ({UNTESTED})" if untested else ""
    none += f", {dead} with a model that never learned" if dead else ""
    return (
        f"{family.title}: {family.reference} is better in {ahead}{named(family, 1)} and worse in {behind}"
        f"{named(family, -1)} of {plural(len(found), 'comparison')}, "
        f"{len(found) - ahead - behind - untested - dead} undecided{none}. Measured {splits_of(family)}; paired t "
        f"test, Holm p < {SIGNIFICANT:g}."
    )


def named(family: Family, sign: int) -> str:
    """The models over which the reference wins, or to which it loses, if they are few: " (RWKV, Based)"."""
    others = list(dict.fromkeys(one.other for one in family.contrasts if one.favours == sign))
    return f" ({', '.join(others)})" if 0 < len(others) <= FEW else ""


def splits_of(family: Family) -> str:
    """The data that models were compared on."""
    splits = {contrast.split for contrast in family.contrasts}
    if len(splits) > 1:
        return "on held-out data where both models have them"
    return "on the test split" if "test" in splits else "on held-out data"


def notes_on_table(family: Family) -> Iterator[str]:
    """What the table of comparisons owes to the choice of rates and epochs."""
    changed = [
        f"{difference_of(contrast.reference, contrast.other)} ({contrast.at}) {equals(contrast.selected_p)} there"
        for contrast in family.contrasts
        if (contrast.selected_p < SIGNIFICANT) != (contrast.found.t_holm < SIGNIFICANT)
    ]
    changes = f"That changes an answer: Holm p of {'; '.join(changed)}." if changed else "That changes no answer."
    yield (
        "Each seed's rate is chosen on the other seeds only. The tables of accuracies have the rate that is best over "
        f"all seeds. {changes}"
    )
    if any(contrast.split == "test" for contrast in family.contrasts):
        yield (
            "The epoch was chosen on the test split itself, so these accuracies are selected for being high. Runs with "
            "task.held_out are compared on the held-out split instead."
        )


def without_state(results: Results) -> str:
    """Which models the figure of state sizes leaves out, and why; "" if it has all."""
    sizeless = ", ".join(dict.fromkeys(str(cell.model) for cell in results.cells if cell.state_bytes is None))
    if not sizeless:
        return ""
    return (
        f"Not shown: {sizeless}. The size of a state is known for mixers that can generate (extend), and for mixers of "
        "your own if rebased report imports them (--import)."
    )


def reference_notes(results: Results) -> list[str]:
    """Where the reference values of each task are from, and in which settings its runs differ; once if it is the same
    for several tasks."""
    notes = []
    for task in results.tasks:
        if cells := [cell.reference for cell in results.of_task(task) if cell.reference_value]:
            name = results.known.name
            differ = list(dict.fromkeys(text for cell in cells for text in cell.differences))
            apart = f"These runs differ from the {name}'s: {'; '.join(differ)}."
            how = apart if differ else f"Settings are the {name}'s."
            sources = " and ".join(dict.fromkeys(cell.source for cell in cells))
            notes.append(f"The {name}'s values are from {sources}. {how}")
    return list(dict.fromkeys(notes))


def list_values(confounds: Confounds) -> str:
    """'precision fp32 (12 runs), bf16 (6 runs); epochs ...'"""
    counts = {
        key: ", ".join(f"{value} ({plural(count, 'run')})" for value, count in values.most_common())
        for key, values in confounds.items()
    }
    return "; ".join(f"{key} {listed}" for key, listed in counts.items())


def warnings(found: Collection, results: Results) -> Iterator[str]:
    """What a reader must know before believing the results."""
    yield from warn_about_code(found.runs)
    if results.repeated:
        yield (
            f"{plural(results.repeated, 'run')} left out: the same as another except for execution settings (device, "
            "micro_batch, ...). That with the first digest counts."
        )
    if differ := training_confounds(results):
        yield (
            "Compared runs were not all trained with the same settings, which may cause differences: "
            f"{list_values(differ)}."
        )
    if differ := execution_confounds(results):
        yield (
            "Runs of one cell have different execution settings, which should not change their results: "
            f"{list_values(differ)}."
        )
    yield from warn_about_open_runs([run for run in found.runs if run.status not in COUNTED], found)
    yield from warn_about_diverged(found.runs)
    yield from describe_given_up(found.runs)
    if uneven := sum(bool(cell.choice.left_out) and not cell.choice.staged for cell in results.cells):
        yield f"In {plural(uneven, 'cell')} some learning rates have fewer seeds than others. They could not be chosen."
    if single := sum(cell.test.n == 1 for cell in results.cells):
        yield f"{plural(single, 'cell')} of {len(results.cells)} with one seed only: no spread, no test."
