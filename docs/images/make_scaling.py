"""Draw the figures of docs/scaling.md from committed records: python docs/images/make_scaling.py [FOLDER]"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.scale_report import CLUSTER, GPUS, serve, step
from benchmarks.scaling import Way
from docs.images.style import save


def draw_training(pyplot: Any, colours: dict[str, str]) -> Any:
    """Speed by number of GPUs: the paper's training, and sequences of 65,536 tokens."""
    figure, axes = pyplot.subplots(1, 2, figsize=(9.6, 4.0))
    lines: list[tuple[int, int, str, Way, str, str]] = [
        (0, 4096, "paper-text", "ddp", "ReBased, ddp", "-"),
        (0, 4096, "paper-text", "fsdp", "ReBased, fsdp", "--"),
        (0, 4096, "attention", "ddp", "attention, ddp", "-"),
        (1, 2**16, "paper-text", "ddp", "ReBased, ddp", "-"),
        (1, 2**16, "paper-text", "fsdp", "ReBased, fsdp", "--"),
        (1, 2**16, "attention", "ddp", "attention, ddp", "-"),
    ]
    for axis, T, name, way, label, style in lines:
        made = [each for n in GPUS if (each := step(name, way, n, T)) is not None]
        colour = colours["rebased" if name == "paper-text" else "softmax"]
        look = {"color": colour, "ls": style, "lw": 2.4 if name == "paper-text" else 1.6, "label": label}
        fits = [each for each in made if each.memory <= CLUSTER.memory]
        axes[axis].plot([each.n for each in fits], [each.tokens_per_second for each in fits], marker="o", ms=3, **look)
    titles = ("T = 4,096: 1,024 sequences per step", "T = 65,536: 64 sequences per step")
    for axis, title in zip(axes, titles, strict=True):
        axis.set(xscale="log", yscale="log", xlabel="GPUs")
        axis.set_title(title, fontsize=11, loc="left")
        axis.set_xticks([1, 4, 16, 64, 256, 1024], ["1", "4", "16", "64", "256", "1,024"])
        axis.set_yticks([1e4, 1e5, 1e6, 1e7, 1e8], ["10 k", "100 k", "1 M", "10 M", "100 M"])
        axis.set_ylim(3e3, 3e8)
        axis.minorticks_off()
        axis.grid(lw=0.6)
        axis.tick_params(length=0)
        axis.legend(frameon=False, fontsize=9.5, loc="upper left")
    axes[0].set_ylabel("tokens per second (model)")
    return figure


def draw_serving(pyplot: Any, colours: dict[str, str]) -> Any:
    """Sequences per GPU, and the most tokens per second, by context."""
    figure, axes = pyplot.subplots(1, 2, figsize=(9.6, 3.6))
    contexts = [2**i for i in range(6, 21)]
    for name, label, colour in (("paper-text", "ReBased", "rebased"), ("attention", "attention", "softmax")):
        made = [serve(name, T) for T in contexts]
        look = {"color": colours[colour], "lw": 2.4 if name == "paper-text" else 1.6, "label": label}
        axes[0].plot(contexts, [each.sequences for each in made], **look)
        axes[1].plot(contexts, [each.tokens_per_second for each in made], **look)
    titles = ("sequences that one H200 holds", "tokens per second at most, all of them decoding")
    for axis, title in zip(axes, titles, strict=True):
        axis.set(xscale="log", yscale="log", xlabel="context, tokens")
        axis.set_title(title, fontsize=11, loc="left")
        axis.set_xticks([64, 1024, 16_384, 262_144], ["64", "1,024", "16,384", "262,144"])
        axis.minorticks_off()
        axis.grid(lw=0.6)
        axis.tick_params(length=0)
        axis.legend(frameon=False, fontsize=9.5, loc="lower left")
    axes[0].set_yticks([1, 100, 10_000], ["1", "100", "10,000"])
    axes[1].set_yticks([100, 10_000, 1e6], ["100", "10 k", "1 M"])
    return figure


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).parent
    save("scaling", folder, draw_training)
    save("serving", folder, draw_serving)
