"""One model against each of the others on the same seeds: at each width, and over all widths together."""

from collections import Counter
from collections.abc import Mapping, Sequence
from math import nan
from statistics import fmean
from typing import NamedTuple

from rebased.analysis.paired import compare_all
from rebased.config import did_you_mean
from rebased.report.comparisons import Contrast
from rebased.report.synthetic.cells import Cell, Results, has_learned
from rebased.runs.run_names import ModelName


class Family(NamedTuple):
    """Comparisons whose p values are corrected together."""

    title: str
    reference: str  # the kind of model that others are compared with
    contrasts: Sequence[Contrast]


def choose_references(results: Results, wanted: str | None) -> dict[ModelName, ModelName]:
    """The model that each model is compared with.

    `wanted` is the name of a model, or a kind of model. The default kind is ReBased, or else the kind with most
    results. If models of that kind differ in settings, the reference is the one with the same settings as the compared
    model, or else the one whose settings are nearest to those of the reference values.
    """
    counts = Counter(cell.model.kind for cell in results.cells)
    named = {str(model): model for model in results.models}
    if wanted in named:
        return {model: named[wanted] for model in results.models if model != named[wanted]}
    if wanted is not None and wanted not in counts:
        raise ValueError(f"there is no model {wanted!r} in these runs; {did_you_mean(wanted, [*counts, *named])}")
    kind = wanted or max(counts, key=lambda kind: (kind == "ReBased", counts[kind]))
    alike = {model.differences: model for model in results.models if model.kind == kind}
    departures = {cell.model: len(cell.reference.differences) for cell in reversed(results.cells)}
    usual = min(alike.values(), key=lambda model: departures[model])
    return {
        model: usual if model.kind == kind else alike.get(model.differences, usual)
        for model in results.models
        if model != usual
    }


def compare_models(results: Results, reference: str | None = None) -> list[Family]:
    """Up to two families of comparisons: over all widths (the mean per seed), and at each width. Tasks that nobody
    learned are in none."""
    references = choose_references(results, reference)
    single, pooled = [], []
    for task in filter(results.learned, results.tasks):
        for other, chosen in references.items():
            both = [
                (ours, theirs)
                for d_model in results.widths
                if (ours := results.find(task, chosen, d_model)) and (theirs := results.find(task, other, d_model))
            ]
            single += [[pair] for pair in both]
            pooled += [both] if len(both) > 1 else []
    chosen_ones = set(references.values())
    name = next((str(one) if len(chosen_ones) == 1 else one.kind for one in chosen_ones), "")
    named = {"Over all widths together": _contrasts(pooled), "At each width": _contrasts(single)}
    return [Family(title, name, contrasts) for title, contrasts in named.items() if contrasts]


def _contrasts(groups: Sequence[Sequence[tuple[Cell, Cell]]]) -> list[Contrast]:
    about, pairs, selected, runs, learned = [], [], [], [], []
    for group in groups:
        held_out = all(cell.held_out for pair in group for cell in pair)
        mine, others = zip(*group, strict=True)
        ours, theirs = mean_by_seed(mine, held_out), mean_by_seed(others, held_out)
        if ours.keys() & theirs.keys():
            trained = [run for cell in (*mine, *others) for run in cell.chosen.values()]
            place = (mine[0].task, tuple(cell.d_model for cell in mine), str(mine[0].model), str(others[0].model))
            about.append((*place, "held out" if held_out else "test", len({run.code for run in trained}) == 1))
            pairs.append((ours, theirs))
            selected.append(
                (mean_by_seed(mine, held_out, selected=True), mean_by_seed(others, held_out, selected=True))
            )
            runs.append(trained)
            sides = ([run for cell in side for run in cell.all_runs] for side in (mine, others))
            learned.append(all(any(map(has_learned, side)) for side in sides))
    contrasts = []
    for what, some, found, leaky, both in zip(
        about, runs, compare_all(pairs), compare_all(selected), learned, strict=True
    ):
        found = found._replace(unpaired=sum(run.seed not in found.seeds for run in some))
        if not both:
            found = found._replace(t_p=nan, t_holm=nan, wilcoxon_p=nan, wilcoxon_holm=nan)
        contrasts.append(Contrast(*what, found, leaky.t_holm if both else nan, both))
    return contrasts


def mean_by_seed(cells: Sequence[Cell], held_out: bool, selected: bool = False) -> Mapping[int, float]:
    """The mean accuracy over cells, by seed, for the seeds that all cells have. The rate of a seed is chosen on other
    seeds; with `selected` on all of them, the seed itself among them."""
    accuracies = [cell.accuracies(held_out) if selected else cell.unselected(held_out) for cell in cells]
    seeds = set.intersection(*(set(one) for one in accuracies))
    return {seed: fmean(one[seed] for one in accuracies) for seed in sorted(seeds)}
