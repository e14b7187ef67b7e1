"""Draw the picture of the kernels: python docs/images/make_kernels.py [FOLDER]

Left, the similarity of a query and a key as a function of s = q . k / sqrt(K). Right, the share of attention that
stays on the one key that equals the query among n others drawn at random: each kernel's noise before any training.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rebased.ops import BASED, REBASED

sys.path.insert(0, str(Path(__file__).parents[2]))
from docs.images.style import save

KERNELS = {"softmax": None, "Based": BASED, "ReBased": REBASED}  # exp(s), 1 + s + s²/2, s²
LABELS = {"softmax": "softmax  $e^{s}$", "Based": "Based  $1+s+s^2/2$", "ReBased": "ReBased  $s^2$"}
WIDTH, TRIALS = 16, 400
OTHERS = [2**n for n in range(11)]


def similarity(s: Tensor, kernel: str) -> Tensor:
    coefficients = KERNELS[kernel]
    if coefficients is None:
        return s.exp()
    c0, c1, c2 = coefficients
    return c0 + c1 * s + c2 * s**2


def normalised(x: Tensor) -> Tensor:
    return torch.nn.functional.layer_norm(x, x.shape[-1:])


def shares_on_the_match() -> dict[str, list[float]]:
    """For each kernel and number of others: mean over trials, with keys as a fresh layer's norm hands them over."""
    generator = torch.Generator().manual_seed(0)
    keys = normalised(torch.randn(TRIALS, 1 + OTHERS[-1], WIDTH, generator=generator))
    s = (keys @ keys[:, 0].unsqueeze(-1)).squeeze(-1) / WIDTH**0.5  # [TRIALS, 1 + others]: the query is key 0
    sims = {kernel: similarity(s, kernel) for kernel in KERNELS}
    shares = {kernel: [sim[:, 0] / sim[:, : n + 1].sum(1) for n in OTHERS] for kernel, sim in sims.items()}
    return {kernel: [float(share.mean()) for share in by_count] for kernel, by_count in shares.items()}


def draw(pyplot: Any, colours: dict[str, str]) -> Any:
    """Both panels."""
    shares = shares_on_the_match()
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9.6, 3.5))
    s = torch.linspace(-3, 2, 401, dtype=torch.float64)
    for kernel, label in LABELS.items():
        colour, width = colours[kernel.lower()], 2.6 if kernel == "ReBased" else 1.8
        left.plot(s, similarity(s, kernel), color=colour, lw=width)
        right.plot(OTHERS, shares[kernel], color=colour, lw=width, marker="o", ms=4, label=label)
    for kernel, (x, y), words in (("based", (-1, 0.5), "never below ½"), ("rebased", (0, 0), "reaches zero")):
        left.plot([x, x], [y, -0.35], color=colours[kernel], lw=1, marker="o", ms=6, markevery=[0])
        left.text(x, -0.7, words, color=colours[kernel], ha="right" if x < 0 else "left", va="center")
    left.set(xlabel=r"$s = q \cdot k \,/ \sqrt{K}$", title="similarity", xlim=(-3, 2), ylim=(-1, 5))
    left.set_yticks(range(6))
    right.legend(frameon=False, loc="upper right")
    right.set(xscale="log", xlabel="random other keys", title="attention on the matching key", ylim=(0, 1.02))
    right.set_xticks([1, 4, 16, 64, 256, 1024], ["1", "4", "16", "64", "256", "1024"])
    right.minorticks_off()
    for axes in (left, right):
        axes.grid(lw=0.6)
        axes.tick_params(length=0)
    return figure


if __name__ == "__main__":
    save("kernels", Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).parent, draw)
