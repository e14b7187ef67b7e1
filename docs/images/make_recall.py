"""Draw the README's first picture from the shipped runs of the demo: python docs/images/make_recall.py [FOLDER]"""

import sys
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from docs.images.style import save

from rebased.cli.demo import SHIPPED
from rebased.report.demo_figures import labelled, recalled, state_words
from rebased.runs.collect import collect

LOOKS = {  # by the name of a model: its colour, and how its line is drawn
    "ReBased": ("rebased", "-"),
    "Based": ("based", "-"),
    "LinearAttention, keys of 36": ("other", "--"),
    "LinearAttention": ("other", "-"),
    "ConvAttention": ("softmax", "-"),
}


def draw(pyplot: Any, colours: dict[str, str]) -> Any:
    """One line per model through the means of its seeds, and a dot per seed."""
    runs = collect([SHIPPED]).runs
    figure, axes = pyplot.subplots(figsize=(9.6, 3.9))
    groups = labelled(runs)
    for name in sorted(groups, key=lambda name: -fmean(recalled(run)[16] for run in groups[name])):
        colour, line = next(look for prefix, look in LOOKS.items() if name.startswith(prefix))
        pairs = sorted(recalled(groups[name][0]))
        means = [100 * fmean(recalled(run)[n] for run in groups[name]) for n in pairs]
        style = {"color": colours[colour], "lw": 2.8 if name.startswith("ReBased") else 1.6, "ls": line}
        shown = name.replace("LinearAttention", "linear attention").replace("ConvAttention", "softmax attention")
        axes.plot(pairs, means, label=f"{shown}: {state_words(groups[name][0])}", **style)
        for run in groups[name]:
            inside = colours[colour] if line == "-" else "none"
            dots = {"color": colours[colour], "mfc": inside, "ms": 3.5, "alpha": 0.6}
            axes.plot(pairs, [100 * recalled(run)[n] for n in pairs], "o", **dots)
    axes.set(xlabel="pairs of key and value in a sequence of 64 tokens", ylim=(0, 103), xlim=(1.6, 16.4))
    axes.set_xticks(pairs)
    seeds = len({run.seed for run in runs})
    axes.set_title(f"recalled in %, by bytes of state; width 32, one head, {seeds} seeds", fontsize=11, loc="left")
    axes.grid(lw=0.6)
    axes.tick_params(length=0)
    axes.legend(frameon=False, loc="center left", fontsize=10, bbox_to_anchor=(1, 0.5))
    return figure


if __name__ == "__main__":
    save("recall", Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).parent, draw)
