"""The page of `rebased demo`: which of three small models learns to recall sooner, and what the runs cannot show."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from math import inf
from statistics import mean
from typing import NamedTuple

from rebased.analysis import sign_test
from rebased.analysis.paired import SIGNIFICANT, equals
from rebased.config import plural
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
        """The number of seeds that both models have."""
        return self.sooner + self.later + self.equal

    @property
    def p(self) -> float:
        """The p value of a two-sided sign test: how probable so clear a result is if both models are equally fast."""
        return sign_test(self.sooner, self.later)

    @property
    def is_decided(self) -> bool:
        """True if p is below SIGNIFICANT."""
        return self.p < SIGNIFICANT


def demo_page(runs: Sequence[Run], command: str) -> Page:
    """The page about these runs. `command` is the command that made the runs and this page."""
    models = list(by_model(runs))
    sections = [
        Section("The task", describe_task(runs[0], models)),
        Section("What this shows", bullets(findings(runs)) + paragraphs(describe_test(runs))),
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
        Section("Size of the state", figure(state_growth(runs), caption)),
        Section("What this test cannot show", bullets(limits(runs))),
        Section("Do it again", how_to_redo(runs, command)),
    ]
    lead = f"{listed(models)} on one small recall task: same data, same settings."
    data = {run.folder: run.lines for run in runs}  # so that the page can be computed from itself
    return Page("How soon do they learn to recall?", lead, sections, describe_origin(runs), data)


def describe_task(run: Run, models: Sequence[str]) -> str:
    """The task and the settings that all models share, as HTML."""
    data, model, train = run.config.task, run.config.model, run.config.train
    attention = " ConvAttention is the paper's name for softmax attention after such a convolution."
    counts = {mixer.arguments()["n_heads"] for mixer in model.mixers if "n_heads" in mixer.arguments()}
    heads = ", with one head" if counts == {1} else ""
    return paragraphs(
        f"{data.task_type.about()} Here: {sizes_of(run.settings['task'])}, from a vocabulary of {data.vocab_size}.",
        f"Every model has {model.n_layers} layers of width {model.d_model}: a gated convolution over three tokens, and "
        f"the layer that is compared{heads}. Same data, same order, same learning rate ({train.lr:g}), "
        f"{sum(part.examples for part in data.train):,} sequences, at most {plural(train.epochs, 'epoch')}."
        + (attention if "ConvAttention" in models else ""),
    )


def listed(words: Iterable[str]) -> str:
    """The words as a list in a sentence: "a, b and c"."""
    *others, last = words
    return f"{', '.join(others)} and {last}" if others else last


def findings(runs: Sequence[Run]) -> list[str]:
    """A sentence per model; then the verdict on the first two models, and a sentence per pair with a further model."""
    groups = by_model(runs)
    pairs = [compare(groups, *names) for names in combinations(groups, 2)]
    verdict = [f"{count(pair)}. {decide(pair)}" for pair in pairs[:1]]
    models = [describe_model(model, group) for model, group in groups.items()]
    return models + verdict + [f"{count(pair)}." for pair in pairs[1:]]


def describe_model(model: str, group: Sequence[Run]) -> str:
    """A sentence about a model: how many runs reached MARK, after how many epochs, and how much they recalled."""
    reached = sum(run.epochs_until(MARK) is not None for run in group)
    how_many = f"{reached} of {len(group)} runs" if len(group) > 1 else "its run" if reached else "none of its runs"
    epochs = f", after {epochs_spread(group, MARK)} epochs" if reached == len(group) else ""
    recalled = mean(run.reported.accuracy for run in group)
    return f"{model} reached accuracy {MARK:g} in {how_many}{epochs}. It recalled {recalled:.1%} of what it was asked."


def compare(groups: Mapping[str, Sequence[Run]], a: str, b: str) -> Pair:
    """The comparison of models a and b: how often each was sooner, over the seeds that both have."""
    a_epochs, b_epochs = ({run.seed: run.epochs_until(MARK) or inf for run in groups[model]} for model in (a, b))
    seeds = a_epochs.keys() & b_epochs.keys()
    sooner = sum(a_epochs[seed] < b_epochs[seed] for seed in seeds)
    later = sum(a_epochs[seed] > b_epochs[seed] for seed in seeds)
    equal = len(seeds) - sooner - later
    return Pair(a, b, sooner, later, equal) if sooner >= later else Pair(b, a, later, sooner, equal)


def count(pair: Pair) -> str:
    """A sentence with the counts of a pair."""
    if not pair.sooner:
        return f"{pair.one} and {pair.other} did not differ with any seed"
    text = f"{pair.one} needed fewer epochs than {pair.other} with {pair.sooner} of {plural(pair.seeds, 'seed')}"
    text += f" and more with {pair.later}" if pair.later else ""
    return text + (f"; with {pair.equal} there was no difference" if pair.equal else "")


def decide(pair: Pair) -> str:
    """The conclusion from a pair, or a sentence that the runs do not decide."""
    p = f"(sign test, p {equals(pair.p)})"
    if pair.is_decided:
        return f"So {pair.one} learns this task sooner {p}."
    if sign_test(pair.seeds, 0) >= SIGNIFICANT:
        return f"With {plural(pair.seeds, 'seed')} no result can decide which learns sooner; --seeds 8 can."
    return f"These runs do not decide which learns sooner {p}."


def describe_test(runs: Sequence[Run]) -> str:
    """Sentences about what is compared, and by which test if there are seeds enough for one."""
    groups = by_model(runs)
    models = list(groups)
    enough = len(models) > 1 and sign_test(compare(groups, *models[:2]).seeds, 0) < SIGNIFICANT
    test = (
        " p is the probability of so clear a result if both models learn equally fast. "
        f"Below {SIGNIFICANT:g} the question counts as decided."
    )
    others = "; other pairs are only counted" if len(models) > 2 else ""
    return (
        f"The demo asks one question: which of {listed(models[:2])} learns sooner? It is asked seed by seed, by the "
        f"epochs until test accuracy {MARK:g}{others}.{test if enough else ''}"
    )


def limits(runs: Sequence[Run]) -> list[str]:
    """What a reader must not conclude from a small test."""
    seeds = len({run.seed for run in runs})
    longest = max(run.seq_len for run in runs)
    return [
        "How much a model recalls in the end. Runs are short: a model that has not begun to learn after "
        f"{plural(last_epoch(runs), 'epoch')} might begin later. This test compares how soon models learn.",
        f"How large a difference is. With {plural(seeds, 'seed')} per model, all at one learning rate, the number of "
        "epochs is uncertain. The paper has five seeds at each of four rates, and takes each model's best rate.",
        f"What happens in long sequences. Here they have {longest} tokens. The paper goes up to 2,048 tokens, 512 "
        "pairs and a vocabulary of 8,192, and its differences grow with length: there a state of constant size cannot "
        "hold everything.",
        "Which model is better on other tasks. Task, width and learning rate were chosen so that models differ after "
        "minutes on two cores.",
        "Speed. Times were measured on a CPU that trained several runs at once. They say nothing about a GPU or long "
        "sequences.",
        "Accuracy is the best of all epochs on the test set, as in the paper. That is too high for all models alike, "
        "because the epoch is chosen on the same set.",
    ]


def last_epoch(runs: Sequence[Run]) -> int:
    """The largest number of epochs that a run was allowed."""
    return max(run.config.train.epochs for run in runs)


def how_to_redo(runs: Sequence[Run], command: str) -> str:
    """The commands that repeat the demo or one of its runs, as HTML."""
    single = f"rebased train --config {runs[0].folder}/config.yaml --out again"
    return (
        paragraphs("The whole demo (runs that are done are not repeated; --out NEW_FOLDER trains all of them again):")
        + commands([command])
        + paragraphs("One run, from the folder of this page:")
        + commands([single])
        + paragraphs("This page contains the records of all runs as JSON; the button at its end saves them.")
    )
