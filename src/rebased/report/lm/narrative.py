"""Sentences about language models: what was measured, how the models differ, and what to know before believing it."""

from collections.abc import Iterator, Sequence
from statistics import fmean

from rebased.analysis.paired import Verbs, in_words
from rebased.config import plural
from rebased.report.comparisons import Difference
from rebased.report.lm.models import LanguageModels, is_finished, measured, steps, training_differences
from rebased.report.prose import shortened, warn_about_code, warn_about_open_runs
from rebased.runs.collect import Collection

BY_DISTANCE = (
    "The distance of an AR token is the number of tokens since the window last showed the bigram that it ends."
)
PERPLEXITY = Verbs("has higher perplexity than", "has lower perplexity than", "have equal perplexity")


def lead(found: Collection, groups: Sequence[LanguageModels]) -> str:
    """'9 runs of language models: 3 models, 1 text, 3 seeds.'"""
    names = {name for group in groups for name in group.models}
    texts = {run.lines[0]["corpus"]["sha256"] for run in found.lm_runs}
    seeds = {run.seed for run in found.lm_runs}
    counts = (plural(len(names), "model"), plural(len(texts), "text"), plural(len(seeds), "seed"))
    return f"{plural(len(found.lm_runs), 'run')} of language models: {', '.join(counts)}."


def describe_data(found: LanguageModels) -> str:
    """What the perplexities of a group are of, and how many tokens its models were trained on."""
    run = found.runs[0]
    corpus, score, data = run.lines[0]["corpus"], measured(run, found.split), run.settings["data"]
    apart = "" if data["isolate_documents"] else "not "
    tokens = {steps(each)[-1]["tokens"] for each in found.runs}
    return (
        f"Perplexity on split {found.split}: {score['tokens']:,} tokens of {corpus['tokenizer']} in windows of "
        f"{data['seq_len']:,}, documents {apart}kept apart; {score['ar_share']:.3f} of them are AR. Trained on "
        f"{' or '.join(f'{number:,}' for number in sorted(tokens))} tokens."
    )


def remarks(found: LanguageModels) -> list[str]:
    """What a reader of `rebased lm compare` must know, one sentence group per line."""
    said = [
        describe_data(found),
        "± is half of a 95 % interval of the mean over three or more seeds (Student's t), not corrected for the number "
        "of intervals. Differences are of the same seeds, so of the same tokens in the same order; where 0 is within "
        "±, these seeds do not tell which model is better.",
    ]
    if remark := found.known.of(found.runs[0]).remark:
        said.append(remark)
    if found.by_distance:
        said.append(BY_DISTANCE)
    said += cautions(found)
    versions = list(dict.fromkeys(f"{run.code} on {run.device}" for run in found.runs))
    return [*said, f"Code: {'; '.join(versions)}."]


def cautions(found: LanguageModels) -> Iterator[str]:
    """What a reader must know before comparing these models."""
    if differ := training_differences(found.runs):
        yield f"Not all were trained alike: {differ} ({found.data})."
    if found.overfitting:
        yield found.overfitting
    if found.left_out:
        yield f"Left out, not done or there twice: {', '.join(found.left_out)}."
    lacking = [run.folder for run in found.without_distances]
    if 0 < len(lacking) < len(found.runs):
        yield (
            f"AR tokens by distance: {len(lacking)} of {plural(len(found.runs), 'run')} left out, whose records do not "
            f"have them: {shortened(lacking)}."
        )


def summary(groups: Sequence[LanguageModels], differences: Sequence[Sequence[Difference]]) -> Iterator[str]:
    """One ranking per group of models, and one sentence per tested comparison on all tokens."""
    for group, found in zip(groups, differences, strict=True):
        means = {model: fmean(group.values(model, "all").values()) for model in group.models}
        ranked = ", ".join(f"{model} {means[model]:.2f}" for model in sorted(means, key=lambda model: means[model]))
        where = f" ({group.data})" if len(groups) > 1 else ""
        yield f"Perplexity: {ranked} (all tokens, mean over seeds; lower is better){where}."
        of_all = [one for one in found if one.part == "all"]
        for one in (one for one in of_all if one.found.difference.n > 1):
            yield f"All tokens: {in_words(one.reference, one.other, one.found, PERPLEXITY)}{where}"
        if single := sum(one.found.difference.n < 2 for one in of_all):
            yield f"{plural(single, 'comparison')} of one pair of runs, put to no test{where}."


def warnings(found: Collection, groups: Sequence[LanguageModels]) -> Iterator[str]:
    """What a reader must know before believing the results."""
    yield from warn_about_code(found.lm_runs)
    if len(groups) > 1:
        yield (
            f"The language models were measured on {len(groups)} different sets of tokens (text, window length or "
            "number of tokens). Each set has tables of its own; nothing is averaged or compared across them."
        )
    for group in groups:
        yield from cautions(group)
        if single := [name for name, runs in group.models.items() if len(runs) == 1]:
            yield f"One seed only, so no spread and no test: {', '.join(single)} ({group.data})."
        devices = sorted({run.device for run in group.runs})
        if len(devices) > 1:
            yield f"Speeds are of different devices: {', '.join(devices)} ({group.data})."
    yield from warn_about_open_runs([run for run in found.lm_runs if not is_finished(run)], found)
