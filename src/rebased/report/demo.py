"""The page of `rebased demo`: what the square of ReBased buys, what it costs on this machine, what its state holds."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from statistics import fmean

from rebased.analysis.paired import SIGNIFICANT, equals
from rebased.analysis.ranking import Contrast, contrast_all
from rebased.analysis.unpaired import Groups
from rebased.config import grouped, plural
from rebased.evaluate.attention_speed import HEADS, KEY_WIDTH, VALUE_WIDTH, Timing
from rebased.evaluate.readout import Readout
from rebased.report.demo_figures import (
    REFERENCE,
    crossing,
    labelled,
    most_pairs,
    recall_by_pairs,
    recalled,
    state_words,
    time_by_length,
)
from rebased.report.drawing import grid
from rebased.report.heatmap import heatmap
from rebased.report.page import Page, Section, bullets, commands, describe_origin, figure, paragraphs
from rebased.report.tables import NONE, Table
from rebased.runs.finished import Run
from rebased.runs.run_names import sizes_of

WHY = (
    "Why the square helps: the similarity of linear attention is positive for every key and grows slowly with q · k, "
    "so the value that is asked for drowns in the sum of all others. The square of a learnt, normalised q · k has a "
    "peak where query and key match and is near zero for most other keys, so it suppresses the neighbours of the match."
)


def demo_page(
    runs: Sequence[Run],
    shipped: Sequence[Run],
    timings: Sequence[Timing],
    maps: Mapping[str, Readout],
    command: str,
    suite: str | None = None,
) -> Page:
    """The page about these runs and measurements. `shipped` are finished runs with other seeds, drawn behind; `maps`
    are by `label`. `command` is the command that made the page; `suite` is a link to an existing page of a suite."""
    sections = [
        Section("In three sentences", bullets(three_sentences(runs, shipped, timings, maps))),
        Section("What does the square buy?", show_recall(runs, shipped)),
        Section(
            "What does it cost on this machine?",
            figure(
                time_by_length(timings),
                f"One sequence, {HEADS} heads, fp32: keys of {KEY_WIDTH} and values of {VALUE_WIDTH} in ReBased, heads "
                f"of {VALUE_WIDTH} in softmax attention. Each point is the fastest of a few calls, measured after "
                "training. Both axes are logarithmic.",
            ),
        ),
        Section("What does the state hold?", show_states(maps)),
        Section("What this cannot show", bullets(limits(runs))),
        Section(
            "Do it again",
            paragraphs("Runs that are done are not repeated; --out NEW_FOLDER trains all of them again:")
            + commands([command, f"rebased train --config {runs[0].folder}/config.yaml --out again"])
            + paragraphs(
                "The last line trains one run, from the folder of this page. The button below saves all data.",
                "What do other mixers recall at equal bytes of state, and what does yours? The first command shows "
                "ours, the second trains yours and compares it:",
            )
            + commands(["rebased suite quick", "rebased suite quick my_mixer.py:MyMixer"])
            + (f'<p><a href="{escape(suite)}">The page of the suite</a> that you have.</p>' if suite else ""),
        ),
    ]
    data = {
        "runs": {run.folder: run.lines for run in runs},
        "timings": [timing._asdict() for timing in timings],
        "keys_held": {name: found.rank.tolist() for name, found in maps.items()},
    }
    lead = f"{plural(len(labelled(runs)), 'small model')} on one recall task, and two operators, on this machine."
    return Page("What does the square buy?", lead, sections, describe_origin(runs), data)


def show_recall(runs: Sequence[Run], shipped: Sequence[Run]) -> str:
    """The figure of recall, why the square helps, what was held equal, and the table, as HTML."""
    judged = "the shipped seeds" if shipped else "the seeds"
    behind = f" Bands: {seeds_of(shipped, 'shipped seed')}, from the least to the greatest." if shipped else ""
    task, train = runs[0].config.task, runs[0].config.train
    held_equal = (
        f"Held equal: the task ({sizes_of(runs[0].settings['task'])}, {task.vocab_size} tokens), the sequences and "
        f"their order, at most {plural(train.epochs, 'epoch')}, and the model around the layer that is compared: width "
        f"{runs[0].d_model}, a short convolution before it, one head. The label says how wide keys are. With keys of "
        "one width the states differ in bytes; the wider keys of LinearAttention give it the bytes of ReBased. The "
        f"learning rate is {rates(runs)}. Bytes are those of one sequence in fp32. Softmax attention keeps all keys "
        "and values, so its bytes grow."
    )
    return (
        figure(
            recall_by_pairs(runs, shipped),
            f"Dots, and lines through their means: {seeds_of(runs)} trained on your machine, now.{behind}",
        )
        + paragraphs(WHY, held_equal)
        + verdict_table(runs, shipped).to_html()
        + paragraphs(
            f"Difference: to {REFERENCE}, of the means over {judged}. p: of a permutation test on the same seeds, "
            f"after Holm's correction over all rows. Below {SIGNIFICANT:g} the difference counts as decided."
        )
    )


def show_states(maps: Mapping[str, Readout]) -> str:
    """What each model's state holds while it reads, as HTML."""
    drawn = {
        f"{name}: {held(found)} of {len(found.keys)}": heatmap(found.probability.T.tolist(), f"The state of {name}")
        for name, found in maps.items()
    }
    return figure(
        grid(drawn, 3),
        "A row per key, a column per two tokens that the model has read. The darker, the more probable is the key's "
        "value if the model is asked for it then. The pairs come first; after them the state must keep what it holds.",
    )


def rates(runs: Sequence[Run]) -> str:
    """The learning rate of each kind of model: "0.01", or "0.02 for LinearAttention and 0.01 for ReBased"."""
    by_rate = grouped(runs, lambda run: run.lr)
    if len(by_rate) == 1:
        return f"{runs[0].lr:g}"
    names = {rate: dict.fromkeys(run.model for run in some) for rate, some in by_rate.items()}
    return listed(f"{rate:g} for {listed(models)}" for rate, models in names.items())


def seeds_of(runs: Sequence[Run], noun: str = "seed") -> str:
    """The number of seeds: "6 seeds"."""
    return plural(len({run.seed for run in runs}), noun)


def verdicts(runs: Sequence[Run]) -> list[Contrast]:
    """The reference against every other model, at the largest number of pairs."""
    pairs, groups = most_pairs(runs), labelled(runs)
    values: dict[str, Groups] = {name: {pairs: [recalled(run)[pairs] for run in groups[name]]} for name in groups}
    reference = next(name for name in groups if name.startswith(REFERENCE))
    return contrast_all({(reference, name): (values[reference], values[name]) for name in groups if name != reference})


def three_sentences(
    runs: Sequence[Run], shipped: Sequence[Run], timings: Sequence[Timing], maps: Mapping[str, Readout]
) -> tuple[str, str, str]:
    """The answers to the page's three questions."""
    return recall_sentence(runs, shipped), cost_sentence(timings), state_sentence(runs, maps)


def recall_sentence(runs: Sequence[Run], shipped: Sequence[Run] = ()) -> str:
    """Which models the reference recalls more or less than, and which comparisons are undecided.

    The shipped seeds decide, if there are any: the runs of this machine are few, and say whether it is the same here.
    """
    judged = shipped or runs
    pairs, found, groups = most_pairs(judged), verdicts(judged), labelled(judged)
    outcomes: dict[str, list[str]] = {"more than": [], "less than": [], "undecided against": []}
    for one in found:
        words = "more than" if one.favours(one.a) else "less than" if one.is_decided else "undecided against"
        outcomes[words].append(f"{one.b} ({recall_of(groups[one.b], pairs):.0%})")
    parts = [f"{words} {listed(others)}" for words, others in outcomes.items() if others]
    reference = found[0].a
    here = f" Your {seeds_of(runs)}: {recall_of(labelled(runs)[reference], pairs):.0%}." if shipped else ""
    seeds, own = seeds_of(judged, "shipped seed" if shipped else "seed"), recall_of(groups[reference], pairs)
    return f"Recall: at {pairs} pairs {REFERENCE} answers {own:.0%} over {seeds}, {', '.join(parts)}.{here}"


def recall_of(runs: Sequence[Run], pairs: int) -> float:
    """The mean accuracy of some runs at this number of pairs."""
    return fmean(recalled(run)[pairs] for run in runs)


def cost_sentence(timings: Sequence[Timing]) -> str:
    """From which length on the operator is faster than softmax attention, and by how much at the longest."""
    lengths = [one.T for one in timings]
    at = crossing(lengths, [one.poly_both for one in timings], [one.softmax_both for one in timings])
    last = timings[-1]
    ratio = last.softmax_both / last.poly_both
    if at is None:
        found = f"slower than softmax attention up to {last.T:,} tokens: it takes {1 / ratio:.1f} times as long there"
    else:
        begin = "at every length" if at <= lengths[0] else f"from about {round(at, -2):,.0f} tokens on"
        found = f"faster than softmax attention {begin}, {ratio:.1f} times at {last.T:,} tokens"
    return f"Cost: on this machine the operator is {found} (forward and backward)."


def state_sentence(runs: Sequence[Run], maps: Mapping[str, Readout]) -> str:
    """How many keys each model can be asked for after one sequence, with the bytes of its state."""
    states = {name: state_words(group[0]) for name, group in labelled(runs).items()}
    each = listed(f"{held(one)} from {name} ({states[name]})" for name, one in maps.items())
    keys = len(next(iter(maps.values())).keys)
    return f"State: at the end of a sequence it still holds, of {keys} pairs, {each}."


def held(found: Readout) -> int:
    """The number of keys whose value is the most probable token at the end."""
    return int((found.rank[-1] == 0).sum())


def listed(words: Iterable[str]) -> str:
    """The words as a list in a sentence: "a, b and c"."""
    *others, last = words
    return f"{', '.join(others)} and {last}" if others else last


def verdict_table(runs: Sequence[Run], shipped: Sequence[Run]) -> Table:
    """One row per model: its state, size and training time, its recall of the most pairs, and the difference."""
    pairs, judged = most_pairs(runs), shipped or runs
    found, groups = {one.b: one for one in verdicts(judged)}, labelled(judged)
    rows = [
        (
            name,
            state_words(now[0]),
            f"{now[0].parameters:,}",
            f"{fmean(run.seconds for run in now):.0f} s",
            *(f"{recall_of(some, pairs):.1%}" for some in (now, groups[name])),
            f"{-100 * found[name].effect.difference:+.1f} points" if name in found else NONE,
            equals(found[name].p).removeprefix("= ") if name in found else NONE,
        )
        for name, now in labelled(runs).items()
    ]
    recall = (f"recalled of {pairs} pairs, here", "shipped" if shipped else "all seeds")
    return Table(("model", f"state, T = {runs[0].seq_len}", "parameters", "training", *recall, "difference", "p"), rows)


def limits(runs: Sequence[Run]) -> list[str]:
    """What a reader must not conclude from a small test."""
    longest, epochs = max(run.seq_len for run in runs), plural(runs[0].config.train.epochs, "epoch")
    return [
        f"What a model recalls in the end. Training for {epochs} is short. The task and its size were chosen so that "
        f"{REFERENCE} leaves the plateau in time; each model's rate is the best of three, chosen on other seeds.",
        f"Long sequences. Here they have {longest} tokens.",
        "Other tasks. A sum of values cannot overwrite what it holds, and this task never asks it to.",
        "A GPU. Times are those of this CPU; the documentation has those of the GPU kernels.",
    ]
