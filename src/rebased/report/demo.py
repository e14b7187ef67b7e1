"""The page of `rebased demo`: what the square of ReBased buys, what it costs on this machine, what its state holds."""

from collections.abc import Iterable, Mapping, Sequence
from math import exp, log
from statistics import fmean
from typing import Any, NamedTuple

from rebased.analysis import Comparison, compare_all
from rebased.analysis.paired import SIGNIFICANT, equals
from rebased.config import plural
from rebased.evaluate.attention_speed import HEADS, KEY_WIDTH, VALUE_WIDTH, Timing
from rebased.evaluate.readout import Readout
from rebased.report.drawing import (
    INK,
    Axes,
    FuncFormatter,
    Panels,
    draw_chance,
    draw_panels,
    hover,
    named_looks,
    powers_of_two,
)
from rebased.report.heatmap import heatmap, panels
from rebased.report.page import Page, Section, bullets, commands, describe_origin, figure, paragraphs
from rebased.report.tables import NONE, Table
from rebased.runs.finished import Run
from rebased.runs.run_names import sizes_of

REFERENCE = "ReBased"  # the model that the others are compared with
OPERATOR, SOFTMAX = "poly_attention (ReBased)", "scaled_dot_product_attention (softmax)"
WHY = (
    "Why the square helps: linear attention weighs every key by a similarity that is never far from zero, so what a "
    "query asks for drowns in the sum of all other values. The square of a learnt, normalised q · k is a curve with a "
    "peak where query and key match: it raises the match and suppresses its neighbours."
)


class Verdict(NamedTuple):
    """The reference against another model at the largest number of pairs."""

    other: str
    accuracy: float  # of the other model: the mean over seeds
    found: Comparison  # of the reference minus the other

    @property
    def is_decided(self) -> bool:
        """True if the paired t test, corrected over all comparisons, finds a difference."""
        return self.found.t_holm < SIGNIFICANT


def demo_page(
    runs: Sequence[Run],
    shipped: Sequence[Run],
    timings: Sequence[Timing],
    maps: Mapping[str, Readout],
    command: str,
) -> Page:
    """The page about these runs and measurements. `shipped` are finished runs with other seeds, drawn behind; `maps`
    are by `label`. `command` is the command that made the page."""
    run = runs[0]
    task, train = run.config.task, run.config.train
    seeds = {one.seed for one in runs}
    behind = (
        f" Bands: {len({one.seed for one in shipped})} shipped seeds, from the least to the greatest."
        if shipped
        else ""
    )
    held_equal = (
        f"Held equal: {sizes_of(run.settings['task'])}, {task.vocab_size} tokens, the same sequences in the same order, "
        f"learning rate {train.lr:g}, {plural(train.epochs, 'epoch')}; two layers of width {run.d_model}, a short "
        f"convolution and the layer that is compared, with one head. The keys have one width, except where the label "
        "says otherwise: there the state has the bytes of ReBased's. Bytes are those of one sequence in fp32; softmax "
        "attention keeps all keys and values, so its bytes grow with the sequence."
    )
    sections = [
        Section("In three sentences", bullets(three_sentences(runs, timings, maps))),
        Section(
            "What does the square buy?",
            figure(
                recall_by_pairs(runs, shipped),
                f"Dots and lines: {plural(len(seeds), 'seed')} trained on your machine, now.{behind}",
            )
            + paragraphs(WHY, held_equal)
            + verdict_table(runs).to_html()
            + paragraphs(
                f"Differences to {REFERENCE} at {most_pairs(runs)} pairs, over the same seeds: mean, p of the paired t "
                "test after Holm's correction."
            ),
        ),
        Section(
            "What does it cost on this machine?",
            figure(
                time_by_length(timings),
                f"One sequence, {HEADS} heads, fp32. ReBased has keys of {KEY_WIDTH} and values of {VALUE_WIDTH}, softmax "
                f"attention has heads of {VALUE_WIDTH}. Each point is the fastest of a few calls, measured after training; both axes are logarithmic.",
            ),
        ),
        Section(
            "What does the state hold?",
            figure(
                panels(
                    {
                        f"{name}: {held(one)} of {len(one.keys)}": heatmap(
                            one.probability.T.tolist(), f"What the state of {name} holds"
                        )
                        for name, one in maps.items()
                    },
                    3,
                ),
                "A row per key, a column per two tokens that were read. The darker, the more probable the key's value "
                "if the model is asked for it then: pairs are read first, and the state must keep them.",
            ),
        ),
        Section("What this cannot show", bullets(limits(runs))),
        Section(
            "Do it again",
            paragraphs("Runs that are done are not repeated; --out NEW_FOLDER trains all of them again:")
            + commands([command, f"rebased train --config {run.folder}/config.yaml --out again"])
            + paragraphs("`rebased explore FOLDER` opens a run of this page and asks its state for any key."),
        ),
    ]
    data = {
        "runs": {one.folder: one.lines for one in runs},
        "timings": [one._asdict() for one in timings],
        "maps": {
            name: one._asdict() | {"probability": one.probability.tolist(), "rank": one.rank.tolist()}
            for name, one in maps.items()
        },
    }
    lead = f"{plural(len(labelled(runs)), 'small model')} on one recall task, and two operators, on this machine."
    return Page("What does the square buy?", lead, sections, describe_origin(runs), data)


def label(run: Run) -> str:
    """The name of a run's model on the page: "ReBased, keys of 8"."""
    width = run.settings["model"]["mixers"][-1].get("key_width")
    return f"{run.model}, keys of {width}" if width else run.model


def labelled(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """The runs by `label`, in the order in which they first appear."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(label(run), []).append(run)
    return groups


def state_words(run: Run) -> str:
    """The bytes of a model's state after the longest sequence of the test: "5,008 B", "16,640 B and growing"."""
    now, later = run.state_bytes(run.seq_len), run.state_bytes(2 * run.seq_len)
    return NONE if now is None else f"{now:,} B" + (" and growing" if later != now else "")


def recalled(run: Run) -> dict[int, float]:
    """The accuracy by number of pairs after the last epoch."""
    return {int(pairs): accuracy for pairs, accuracy in run.epochs[-1]["test"]["by_pairs"].items()}


def most_pairs(runs: Sequence[Run]) -> int:
    """The largest number of pairs that was tested."""
    return max(max(recalled(run)) for run in runs)


def verdicts(runs: Sequence[Run]) -> list[Verdict]:
    """The reference against every other model, at the largest number of pairs."""
    pairs = most_pairs(runs)
    values = {name: {run.seed: recalled(run)[pairs] for run in group} for name, group in labelled(runs).items()}
    reference = next(name for name in values if name.startswith(REFERENCE))
    others = [name for name in values if name != reference]
    found = compare_all([(values[reference], values[name]) for name in others])
    return [Verdict(name, fmean(values[name].values()), one) for name, one in zip(others, found, strict=True)]


def three_sentences(
    runs: Sequence[Run], timings: Sequence[Timing], maps: Mapping[str, Readout]
) -> tuple[str, str, str]:
    """The answers to the page's three questions."""
    return recall_sentence(runs), cost_sentence(timings), state_sentence(runs, maps)


def recall_sentence(runs: Sequence[Run]) -> str:
    """Which models the reference recalls more or less than, and which comparisons are undecided."""
    pairs, found = most_pairs(runs), verdicts(runs)
    own = fmean(
        recalled(run)[pairs] for name, group in labelled(runs).items() for run in group if name.startswith(REFERENCE)
    )

    def named(chosen: Iterable[Verdict]) -> str:
        return listed(f"{one.other} ({one.accuracy:.0%})" for one in chosen)

    more = [one for one in found if one.is_decided and one.found.difference.mean > 0]
    less = [one for one in found if one.is_decided and one.found.difference.mean < 0]
    undecided = [one for one in found if not one.is_decided]
    parts = [f"more than {named(more)}"] if more else []
    parts += [f"less than {named(less)}"] if less else []
    parts += [f"undecided against {named(undecided)}"] if undecided else []
    seeds = plural(len({run.seed for run in runs}), "seed")
    return f"Recall: at {pairs} pairs {REFERENCE} answers {own:.0%} over {seeds}, {', '.join(parts)}."


def cost_sentence(timings: Sequence[Timing]) -> str:
    """From which length on the operator is faster than softmax attention, and by how much at the longest."""
    lengths = [one.T for one in timings]
    at = crossing(lengths, [one.poly_both for one in timings], [one.softmax_both for one in timings])
    last = timings[-1]
    ratio = last.softmax_both / last.poly_both
    if at is None:
        return (
            f"Cost: on this machine the operator is slower than softmax attention up to {last.T:,} tokens, "
            f"{1 / ratio:.1f} times there (forward and backward)."
        )
    begin = "at every length" if at <= lengths[0] else f"from about {round(at, -2):,.0f} tokens on"
    return (
        f"Cost: on this machine the operator is faster than softmax attention {begin}, {ratio:.1f} times at "
        f"{last.T:,} tokens (forward and backward)."
    )


def state_sentence(runs: Sequence[Run], maps: Mapping[str, Readout]) -> str:
    """How many keys each model can be asked for after one sequence, with the bytes of its state."""
    states = {name: state_words(group[0]) for name, group in labelled(runs).items()}
    each = [f"{name} {held(one)} ({states[name]})" for name, one in maps.items()]
    keys = len(next(iter(maps.values())).keys)
    return f"State: after a sequence of {keys} pairs the models can be asked for so many of them: {', '.join(each)}."


def held(found: Readout) -> int:
    """The number of keys whose value is the most probable token at the end."""
    return int((found.rank[-1] == 0).sum())


def listed(words: Iterable[str]) -> str:
    """The words as a list in a sentence: "a, b and c"."""
    *others, last = words
    return f"{', '.join(others)} and {last}" if others else last


def crossing(lengths: Sequence[int], ours: Sequence[float], theirs: Sequence[float]) -> float | None:
    """The length from which on `ours` is always smaller, interpolated on logarithmic axes; None if it never is.

    The first length if `ours` is smaller at all of them.
    """
    gaps = [log(one / other) for one, other in zip(ours, theirs, strict=True)]
    behind = max((i for i, gap in enumerate(gaps) if gap >= 0), default=-1)
    if behind == len(gaps) - 1:
        return None
    if behind < 0:
        return float(lengths[0])
    share = gaps[behind] / (gaps[behind] - gaps[behind + 1])
    return exp((1 - share) * log(lengths[behind]) + share * log(lengths[behind + 1]))


def recall_by_pairs(runs: Sequence[Run], shipped: Sequence[Run]) -> Panels:
    """Accuracy by number of pairs: bands of the shipped runs, dots of these, and a line through their means."""
    groups, bands = labelled(runs), labelled(shipped)

    def draw(axes: Axes) -> None:
        for name, look in named_looks(list(groups)).items():
            group, band = groups[name], bands.get(name, [])
            if band:
                pairs = sorted(recalled(band[0]))
                columns = [[recalled(run)[n] for run in band] for n in pairs]
                axes.fill_between(
                    pairs, list(map(min, columns)), list(map(max, columns)), color=look["color"], alpha=0.2, lw=0
                )
            pairs = sorted(recalled(group[0]))
            means = [fmean(recalled(run)[n] for run in group) for n in pairs]
            axes.plot(pairs, means, **look, label=f"{name}: {state_words(group[0])}")
            for run in group:
                axes.plot(
                    pairs,
                    [recalled(run)[n] for n in pairs],
                    color=look["color"],
                    ls="none",
                    marker="o",
                    ms=4,
                    alpha=0.7,
                )
            hover(axes, pairs, means, [f"{name}, {n} pairs: {mean:.1%}" for n, mean in zip(pairs, means, strict=True)])
        draw_chance(axes, runs[0].chance)
        axes.set(xlabel="pairs of key and value in a sequence", ylabel="recalled", ylim=(0, 1.03))
        axes.set_xticks(sorted(recalled(runs[0])))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))

    return draw_panels({"": draw}, "recall-by-pairs", "Recall by number of pairs")


def time_by_length(timings: Sequence[Timing]) -> Panels:
    """Milliseconds by number of tokens: forward, and forward and backward, with the crossing points."""
    lengths = [one.T for one in timings]

    def panel(ours: Sequence[float], theirs: Sequence[float]) -> Any:
        def draw(axes: Axes) -> None:
            for name, (look, times) in {
                SOFTMAX: ({"color": INK, "ls": "--"}, theirs),
                OPERATOR: (named_looks([REFERENCE])[REFERENCE], ours),
            }.items():
                axes.plot(lengths, times, **(look | {"lw": 2, "ms": 4}), marker="o", label=name)
                texts = [f"{name}, {T:,} tokens: {ms:.3g} ms" for T, ms in zip(lengths, times, strict=True)]
                hover(axes, lengths, times, texts)
            at = crossing(lengths, ours, theirs)
            if at is not None and at > lengths[0]:
                axes.axvline(at, color=INK, lw=1, ls=":", label="where they cross")
            powers_of_two(axes, lengths)
            axes.set(yscale="log", xlabel="tokens", ylabel="milliseconds")
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))

        return draw

    return draw_panels(
        {
            "forward": panel([one.poly for one in timings], [one.softmax for one in timings]),
            "forward and backward": panel([one.poly_both for one in timings], [one.softmax_both for one in timings]),
        },
        "time-by-length",
        "Milliseconds by number of tokens",
    )


def verdict_table(runs: Sequence[Run]) -> Table:
    """One row per model: state, parameters, seconds of training, accuracy at most pairs, difference to the reference."""
    pairs, groups = most_pairs(runs), labelled(runs)
    found = {one.other: one.found for one in verdicts(runs)}
    rows = []
    for name, group in groups.items():
        values = [recalled(run)[pairs] for run in group]
        one = found.get(name)
        rows.append(
            (
                name,
                state_words(group[0]),
                f"{group[0].parameters:,}",
                f"{fmean(run.seconds for run in group):.0f} s",
                f"{fmean(values):.1%} ({min(values):.1%} to {max(values):.1%})",
                f"{-one.difference.mean:+.1%}" if one else NONE,
                equals(one.t_holm) if one else NONE,
            )
        )
    head = (
        "model",
        f"state, T = {runs[0].seq_len}",
        "parameters",
        "training",
        f"recalled of {pairs} pairs",
        "difference",
        "p",
    )
    return Table(head, rows)


def limits(runs: Sequence[Run]) -> list[str]:
    """What a reader must not conclude from a small test."""
    longest, epochs = max(run.seq_len for run in runs), runs[0].config.train.epochs
    return [
        f"What a model recalls in the end. {plural(epochs, 'epoch')} at one learning rate are short: longer training, or "
        "a rate of its own for each model, narrows the differences.",
        f"Long sequences. Here they have {longest} tokens; the paper goes up to 2,048 tokens and 512 pairs.",
        "Other tasks. A sum of values cannot overwrite what it holds, and this task never asks it to.",
        "A GPU. Times are those of this CPU; the kernels for GPUs are measured in the documentation.",
    ]
