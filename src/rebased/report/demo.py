"""The page of `rebased demo`: what three small models recalled, said no louder than the runs allow."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from math import inf
from statistics import mean
from typing import NamedTuple

from rebased.analysis import sign_test
from rebased.analysis.paired import SIGNIFICANT, equals
from rebased.report.figures import epochs_until, learning_curves, state_growth
from rebased.report.page import Page, Section, bullets, commands, describe_origin, figure, paragraphs
from rebased.report.tables import accuracy_by_pairs, epochs_by_seed, epochs_spread, summary
from rebased.runs.finished import Run, by_model
from rebased.runs.run_names import sizes_of

MARK = 0.9  # test accuracy at which a model has learnt to recall
SUMMARY_NOTE = (
    f"Epochs to {MARK:g}: the median over runs, and the range; >N means not within N epochs. Accuracy is the share of "
    "asked values that were right on test sequences, in the best epoch: the mean over runs, and the range. State is "
    "what a model keeps of one sequence in order to go on, at 4 bytes per number."
)


class Pair(NamedTuple):
    """Two models on the same seeds. `one` was sooner at least as often as `other`."""

    one: str
    other: str
    sooner: int  # seeds with which `one` reached MARK in fewer epochs
    later: int  # seeds with which `other` did
    equal: int  # seeds with which both needed equally many, or neither reached it

    @property
    def seeds(self) -> int:
        return self.sooner + self.later + self.equal

    @property
    def p(self) -> float:
        """Of a two-sided sign test: the probability that equally fast models differ in so many seeds."""
        return sign_test(self.sooner, self.later)

    @property
    def is_decided(self) -> bool:
        return self.p < SIGNIFICANT


def demo_page(runs: Sequence[Run], command: str) -> Page:
    """`command` is what was typed to make these runs and this page."""
    models = list(by_model(runs))
    sections = [
        Section("The task", describe_task(runs[0])),
        Section("What this shows", bullets(findings(runs)) + paragraphs(describe_test(models))),
        Section(
            f"Epochs until {MARK:g}",
            figure(
                epochs_until(runs, MARK),
                "One column per seed. Runs with the same seed read the same sequences in the same order, so models are "
                "compared within a column.",
            )
            + epochs_by_seed(runs, MARK).to_html()
            + paragraphs(
                f"The rows of models: the first epoch with a test accuracy of {MARK:g} or more; >N means not within N "
                f"epochs. The rows of differences: how many epochs later than {models[0]}, with the same seed."
            ),
        ),
        Section(
            "Accuracy",
            figure(
                learning_curves(runs),
                "One line per run, and a dot at its end: a run stops when it has solved the task "
                f"(test accuracy above {runs[0].config.train.stop_above:g}).",
            ),
        ),
        Section("In numbers", summary(runs, MARK).to_html() + paragraphs(SUMMARY_NOTE)),
    ]
    slices = accuracy_by_pairs(runs)
    if slices:
        sections.append(Section("By number of pairs", slices.to_html()))
    caption = "Computed from the shapes of the models, for one sequence in fp32; both axes are logarithmic."
    sections += [
        Section("What is remembered", figure(state_growth(runs), caption)),
        Section("What it is too small to show", bullets(limits(runs))),
        Section("Do it again", how_to_redo(runs, command)),
    ]
    lead = f"{listed(models)} on one small task of recall: same data, same settings."
    data = {run.folder: run.lines for run in runs}  # the page can be computed anew from itself
    return Page("How soon do they learn to recall?", lead, sections, describe_origin(runs), data)


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
    """The verdict between the first two models; then one sentence per model, and per pair with a further model."""
    groups = by_model(runs)
    pairs = [compare(groups, *names) for names in combinations(groups, 2)]
    verdict = [f"{count(pair)}. {decide(pair)}" for pair in pairs[:1]]
    models = [describe_model(model, group) for model, group in groups.items()]
    return verdict + models + [f"{count(pair)}." for pair in pairs[1:]]


def describe_model(model: str, group: Sequence[Run]) -> str:
    """How many of its runs reached MARK and when, and how much they recalled."""
    reached = sum(run.epochs_until(MARK) is not None for run in group)
    how_many = f"{reached} of {len(group)} runs" if len(group) > 1 else "its run" if reached else "none of its runs"
    epochs = f", after {epochs_spread(group, MARK)} epochs" if reached == len(group) else ""
    recalled = mean(run.reported.accuracy for run in group)
    return f"{model} reached {MARK:g} in {how_many}{epochs}. It recalled {recalled:.1%} of what it was asked."


def compare(groups: Mapping[str, Sequence[Run]], a: str, b: str) -> Pair:
    """How often each of two models was sooner, on the seeds that both have."""
    a_epochs, b_epochs = ({run.seed: run.epochs_until(MARK) or inf for run in groups[model]} for model in (a, b))
    seeds = a_epochs.keys() & b_epochs.keys()
    sooner = sum(a_epochs[seed] < b_epochs[seed] for seed in seeds)
    later = sum(a_epochs[seed] > b_epochs[seed] for seed in seeds)
    equal = len(seeds) - sooner - later
    return Pair(a, b, sooner, later, equal) if sooner >= later else Pair(b, a, later, sooner, equal)


def count(pair: Pair) -> str:
    """With how many seeds which model was sooner, in words."""
    if not pair.sooner:
        return f"{pair.one} and {pair.other} did not differ with any seed"
    text = f"{pair.one} needed fewer epochs than {pair.other} with {pair.sooner} of {pair.seeds} seeds"
    text += f" and more with {pair.later}" if pair.later else ""
    return text + (f"; with {pair.equal} there was no difference" if pair.equal else "")


def decide(pair: Pair) -> str:
    """What follows from it, or that nothing does."""
    p = f"(sign test, p {equals(pair.p)})"
    if pair.is_decided:
        return f"So {pair.one} learns this task sooner {p}."
    few = pair.sooner == pair.seeds
    return f"That is too few seeds to decide {p}." if few else f"These runs do not decide which learns sooner {p}."


def describe_test(models: Sequence[str]) -> str:
    """What is compared, and by which test."""
    others = "; other pairs are only counted" if len(models) > 2 else ""
    return (
        f"The demo asks one question: which of {listed(models[:2])} learns sooner? It is asked seed by seed, by the "
        f"epochs until test accuracy {MARK:g}{others}. p is the probability that models which learn equally fast "
        f"differ in so many seeds. Below {SIGNIFICANT:g} the question counts as decided."
    )


def limits(runs: Sequence[Run]) -> list[str]:
    """What a reader may not conclude from so small a test."""
    seeds = len({run.seed for run in runs})
    longest = max(run.seq_len for run in runs)
    return [
        "How much a model recalls in the end. Runs are short: a model that has not begun to learn after "
        f"{last_epoch(runs)} epochs might begin later. This test compares how soon models learn.",
        f"How large a difference is. With {seeds} seeds per model, all at one learning rate, the number of epochs is "
        "uncertain. The paper has five seeds at each of four rates, and takes each model's best rate.",
        f"What happens in long sequences. Here they have {longest} tokens. The paper goes up to 2,048 tokens, 512 "
        "pairs and a vocabulary of 8,192, and its differences grow with length: there a state of constant size must "
        "forget.",
        "Which model is better elsewhere. Task, width and learning rate were chosen so that there is something to see "
        "within minutes on two cores.",
        "Speed. Times are those of a CPU with runs side by side, and say nothing about a GPU or long sequences.",
        "Accuracy is the best of all epochs on the test set, as in the paper. That flatters all models alike.",
    ]


def last_epoch(runs: Sequence[Run]) -> int:
    return max(run.config.train.epochs for run in runs)


def how_to_redo(runs: Sequence[Run], command: str) -> str:
    single = f"rebased train --config {runs[0].folder}/config.yaml --out again"
    return (
        paragraphs("All of it (runs that are done are not repeated; --out NEW_FOLDER starts afresh):")
        + commands([command])
        + paragraphs("One run, from the folder of this page:")
        + commands([single])
        + paragraphs("The records of all runs are inside this page, as JSON; the button at its end saves them.")
    )
