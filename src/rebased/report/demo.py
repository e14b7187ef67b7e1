"""The page of `rebased demo`: what three small models recalled, said no louder than the runs allow."""

from collections.abc import Iterable, Sequence
from itertools import combinations
from statistics import mean

from rebased.report.figures import learning_curves, state_growth
from rebased.report.page import Page, Section, bullets, commands, describe_origin, figure, paragraphs
from rebased.report.tables import accuracy_by_pairs, summary
from rebased.runs.finished import Run, by_model
from rebased.runs.run_names import sizes_of

CLOSE = 0.01  # accuracies nearer than this are called equal
SUMMARY_NOTE = (
    "Accuracy is the share of asked values that were right on test sequences, in the best epoch; mean over runs, and "
    "from the worst run to the best. State is what a model keeps of one sequence in order to go on: 4 bytes a number."
)


def demo_page(runs: Sequence[Run], command: str) -> Page:
    """`command` is what was typed to make these runs and this page."""
    models = list(by_model(runs))
    sections = [
        Section("The task", describe_task(runs[0])),
        Section(
            "Accuracy",
            figure(
                learning_curves(runs),
                "A line is a run, a dot its end: a run stops when it has solved the task "
                f"(test accuracy above {runs[0].config.train.stop_above:g}).",
            ),
        ),
        Section("In numbers", summary(runs).to_html() + paragraphs(SUMMARY_NOTE)),
    ]
    slices = accuracy_by_pairs(runs)
    if slices:
        sections.append(Section("By number of pairs", slices.to_html()))
    caption = "Computed from the shapes of the models, for one sequence in fp32; both axes are logarithmic."
    sections += [
        Section("What is remembered", figure(state_growth(runs), caption)),
        Section("What this shows", bullets(findings(runs))),
        Section("What it is too small to show", bullets(limits(runs))),
        Section("Do it again", how_to_redo(runs, command)),
    ]
    lead = f"{listed(models)} on one small task of recall: same data, same settings."
    data = {run.folder: run.lines for run in runs}  # the page can be computed anew from itself
    return Page("How much do they recall?", lead, sections, describe_origin(runs), data)


def describe_task(run: Run) -> str:
    data, model, train = run.config.task, run.config.model, run.config.train
    counts = {mixer.arguments()["n_heads"] for mixer in model.mixers if "n_heads" in mixer.arguments()}
    heads = ", with one head" if counts == {1} else ""
    return paragraphs(
        f"{data.task_type.about()} Here: {sizes_of(run.settings['task'])}, from a vocabulary of {data.vocab_size}.",
        f"Every model has {model.n_layers} layers of width {model.d_model}: a gated convolution over three tokens, and "
        f"the layer that is compared{heads}. Same data, same order, same learning rate ({train.lr:g}), "
        f"{sum(part.examples for part in data.train):,} sequences, at most {train.epochs} epochs.",
    )


def listed(words: Iterable[str]) -> str:
    *others, last = words
    return f"{', '.join(others)} and {last}" if others else last


def findings(runs: Sequence[Run]) -> list[str]:
    """A sentence a pair of models. One is called ahead only where each of its runs beats each of the other's."""
    groups = {model: [run.reported.accuracy for run in group] for model, group in by_model(runs).items()}
    lines = [
        f"{model} recalled {mean(values):.1%} of what it was asked{_solved(group)}."
        for (model, values), group in zip(groups.items(), by_model(runs).values(), strict=True)
    ]
    for pair in combinations(groups.items(), 2):
        (one, high), (other, low) = sorted(pair, key=lambda item: mean(item[1]), reverse=True)
        if min(high) - max(low) > CLOSE:
            lines.append(f"In these runs {one} is ahead of {other}: its worst is above the other's best.")
        else:
            lines.append(f"Between {one} and {other} these runs do not decide: their accuracies overlap or nearly do.")
    return lines


def _solved(group: Sequence[Run]) -> str:
    """When its runs passed the mark at which training stops, if all of them did."""
    mark = group[0].config.train.stop_above
    if not all(run.accuracies[-1] > mark for run in group):
        return ""
    epochs = sorted({len(run.epochs) for run in group})
    return f", and was done after {' to '.join(str(n) for n in (epochs[0], epochs[-1])[: len(epochs)])} epochs"


def limits(runs: Sequence[Run]) -> list[str]:
    seeds = len({run.config.train.seed for run in runs})
    longest = max(run.seq_len for run in runs)
    return [
        f"Too few runs for statistics: {seeds} a model, all at one learning rate. The paper has five at each of four "
        "rates, and takes each model's best rate.",
        f"Sequences of {longest} tokens are short. The paper goes up to 2,048 tokens, 512 pairs and a vocabulary of "
        "8,192, and its differences grow with length: that is where a state of constant size must forget.",
        "Task, width and learning rate were chosen so that there is something to see in two minutes on two cores. Here "
        "accuracy is mostly a matter of how soon a model begins to learn, less of how much its state can hold.",
        "Times are those of a CPU with runs side by side, and say nothing about speed on a GPU or on long sequences.",
        "Accuracy is the best of all epochs on the test set, as in the paper: a bit flattering, to all models alike.",
    ]


def how_to_redo(runs: Sequence[Run], command: str) -> str:
    single = f"rebased train --config {runs[0].folder}/config.yaml --out again"
    return (
        paragraphs("All of it (runs that are done are not repeated; --out NEW_FOLDER starts afresh):")
        + commands([command])
        + paragraphs("One run, from the folder of this page:")
        + commands([single])
        + paragraphs("The records of all runs are inside this page, as JSON; the button at its end saves them.")
    )
