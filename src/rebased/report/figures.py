"""The figures of the demo's page: a pure function of records each."""

from collections.abc import Sequence
from math import nan

from rebased.config import plural
from rebased.report.drawing import (
    INK,
    Axes,
    FuncFormatter,
    MaxNLocator,
    Panels,
    draw_chance,
    draw_panels,
    hover,
    looks,
)
from rebased.runs.finished import Run, by_model


def learning_curves(runs: Sequence[Run]) -> Panels:
    """Test accuracy by epoch, one line per run. A dot marks its last epoch; solved runs end early."""

    def draw(axes: Axes) -> None:
        for look, (model, group) in zip(looks(), by_model(runs).items(), strict=False):
            for n, run in enumerate(group):
                epochs = [line["epoch"] for line in run.epochs]
                axes.plot(epochs, run.accuracies, **look, marker="o", markevery=[-1], label=None if n else model)
                texts = [
                    f"{model}, seed {run.seed}, epoch {n}: {a:.3f}" for n, a in zip(epochs, run.accuracies, strict=True)
                ]
                hover(axes, epochs, run.accuracies, texts)
        draw_chance(axes, runs[0].chance)
        last = max(run.config.train.epochs for run in runs)
        axes.set(xlabel="epoch", ylabel="test accuracy", ylim=(0, 1.03), xlim=(0.8, last + 0.2))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))

    return draw_panels({"": draw}, "learning-curves", "Test accuracy by epoch, one line per run")


def epochs_until(runs: Sequence[Run], mark: float) -> Panels:
    """Epochs until test accuracy `mark`, by seed, one point per run. A cross above the last epoch: not reached."""
    seeds = sorted({run.seed for run in runs})
    last = max(run.config.train.epochs for run in runs)

    def draw(axes: Axes) -> None:
        groups = by_model(runs)
        for n, (look, (model, group)) in enumerate(zip(looks(), groups.items(), strict=False)):
            beside = 0.12 * (n - (len(groups) - 1) / 2)  # so that equal numbers do not hide each other
            style = look | {"ls": "none"}
            reached = {run.seed: run.epochs_until(mark) for run in group}
            found = [(seeds.index(seed) + beside, epoch) for seed, epoch in reached.items() if epoch]
            never = [(seeds.index(seed) + beside, last + 1) for seed, epoch in reached.items() if not epoch]
            axes.plot([x for x, _ in found], [y for _, y in found], **style, marker="o", label=model)
            axes.plot([x for x, _ in never], [y for _, y in never], **style, marker="x", mew=2)
            for seed, epoch in reached.items():
                text = f"epoch {epoch}" if epoch else f"not within {plural(last, 'epoch')}"
                hover(axes, [seeds.index(seed) + beside], [epoch or last + 1], [f"{model}, seed {seed}: {text}"])
        axes.plot([], [], color=INK, ls="none", marker="x", label=f"not within {plural(last, 'epoch')}")
        axes.set(xlabel="seed", ylabel=f"epochs until {mark:g}", ylim=(0, last + 1.6), xlim=(-0.5, len(seeds) - 0.5))
        axes.set_xticks(range(len(seeds)), [str(seed) for seed in seeds])
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))

    return draw_panels({"": draw}, "epochs-until", f"Epochs until test accuracy {mark:g}, by seed")


def state_growth(runs: Sequence[Run], longest: int = 8192) -> Panels:
    """KiB of state by number of tokens read, up to so many: computed from the shapes of the models."""
    here = max(run.seq_len for run in runs)

    def draw(axes: Axes) -> None:
        lengths = [max(here // 4, 1)]
        while lengths[-1] < longest:
            lengths.append(2 * lengths[-1])
        for look, (model, group) in zip(looks(), by_model(runs).items(), strict=False):
            sizes = [group[0].state_bytes(length) for length in lengths]
            axes.plot(lengths, [(size or nan) / 1024 for size in sizes], **look, label=model)
            known = [(length, size / 1024) for length, size in zip(lengths, sizes, strict=True) if size]
            texts = [f"{model}, {length:,} tokens: {kib:,.4g} KiB" for length, kib in known]
            hover(axes, [length for length, _ in known], [kib for _, kib in known], texts)
        axes.axvline(here, color=INK, lw=1, ls=":", label=f"this task, T = {here}")
        axes.set(xscale="log", yscale="log", xlabel="tokens read", ylabel="KiB of state per sequence")
        axes.set_xticks(lengths[::2], [f"{length:,}" for length in lengths[::2]])
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        axes.minorticks_off()

    return draw_panels({"": draw}, "state-growth", "KiB of state by number of tokens read")
