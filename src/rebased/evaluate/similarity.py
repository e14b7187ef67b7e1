"""The similarity of queries and keys in a trained model against q . k, and how near to zero it comes: Figure 2."""

from typing import Any

import torch
from torch import Tensor

from rebased.mixers import ReBased, attention_map
from rebased.tasks import IGNORE, Questions

SCORED, PAIRS = 64, 2**23
"""The scores of at most so many examples are kept, of fewer where they have more pairs in all."""
BINS = 80
TAIL = 0.0005  # of the scores at each end, which the histogram leaves out
SMALL = (0.5, 0.1, 0.01, 0.001)
"""A weight is called small below these shares of the uniform weight."""


def scored_examples(mixer: Any, questions: Questions) -> int:
    """Of how many examples the scores of all heads are looked at; at least one."""
    pairs = int(getattr(mixer, "n_heads", 1)) * questions.positions.shape[1] * questions.inputs.shape[1]
    return max(1, min(SCORED, PAIRS // pairs))


def describe_similarity(mixer: Any, inputs: list[Tensor], questions: Questions) -> dict[str, Any] | None:
    """The distribution of scores s = q . k / sqrt(K) at the questions, and of the weights that follow from them.

    inputs: what the mixer reads, batches [B,T,D] of the first examples. Returns numbers and lists only:

        {"scores": histogram of s, "similarity": sim(s) at its centres, "least": the smallest sim,
         "small": {"0.1": share of the weights below a tenth of the uniform weight, ...},
         "lowest": the weight that 1 % of all are below, as a multiple of the uniform weight,
         "learned": see `learned_parabola`; None without gamma and beta}

    None if a similarity is too large for fp64, as exp of a score above 709 is.

    The scale of a similarity means nothing: it cancels when weights are divided by their sum. So "small" compares a
    weight with the one that a model would give if it looked at all visible keys alike.
    """
    scores, raw, weights = [], [], []
    first = 0
    for x in inputs:
        positions, targets = (part[first : first + len(x)] for part in questions[1:])
        seen = (torch.arange(x.shape[1], device=x.device) <= positions.unsqueeze(2)) & (targets != IGNORE).unsqueeze(2)
        H = int(mixer.n_heads)
        pick = seen.unsqueeze(1).expand(-1, H, -1, -1)  # [B,H,Q,T]
        at = positions[:, None, :, None].expand(-1, H, -1, x.shape[1])
        s = mixer.attention_scores(x).gather(2, at)[pick]
        A = attention_map(mixer, x).gather(2, at)
        uniform = (positions + 1)[:, None, :, None].to(A.dtype)
        weights.append((A * uniform)[pick].cpu())
        scores.append(s.cpu())
        if isinstance(mixer, ReBased) and mixer.ln_q.weight is not None:
            raw.append(mixer.raw_scores(x).gather(2, at)[pick].cpu())
        first += len(x)
    s, w = torch.cat(scores).double(), torch.cat(weights).double()

    def similarity(scores: Tensor) -> Tensor:  # computed where learnt coefficients are
        found: Tensor = mixer.similarity(scores.to(inputs[0].device))
        return found.cpu()

    sim = similarity(s)
    if not sim.isfinite().all():
        return None
    edges, density = histogram(s)
    centres = (edges[1:] + edges[:-1]) / 2
    return {
        "pairs": len(s),
        "scores": {"low": float(edges[0]), "high": float(edges[-1]), "density": rounded(density)},
        "quantiles": {str(q): quantile(s, q) for q in (0.01, 0.1, 0.5, 0.9, 0.99)},
        "similarity": rounded(similarity(centres)),
        "least": float(sim.min()),
        "mean": float(sim.mean()),
        "small": {str(share): float((w < share).double().mean()) for share in SMALL},
        "lowest": quantile(w, 0.01),
        "learned": learned_parabola(torch.cat(raw).double(), sim) if raw else None,
    }


def learned_parabola(raw: Tensor, sim: Tensor) -> dict[str, Any]:
    """The similarity as a function of q . k before gamma and beta, over all pairs [n].

    With many features it is no function of q . k alone, so its mean and its 10 % and 90 % quantiles are given by bins,
    and the parabola a u^2 + b u + c that fits all pairs best. All are divided by the mean similarity.
    """
    sim = sim / sim.mean()
    edges, density = histogram(raw)
    bins = torch.bucketize(raw, edges[1:-1])
    in_bins = [sim[bins == i] for i in range(BINS)]
    powers = torch.stack([raw**2, raw, torch.ones_like(raw)], dim=1)
    a, b, c = torch.linalg.lstsq(powers, sim.unsqueeze(1)).solution.flatten().tolist()
    left = sim - powers @ torch.tensor([a, b, c], dtype=sim.dtype)
    return {
        "scores": {"low": float(edges[0]), "high": float(edges[-1]), "density": rounded(density)},
        "mean": [float(here.mean()) if len(here) else None for here in in_bins],
        "low": [quantile(here, 0.1) if len(here) else None for here in in_bins],
        "high": [quantile(here, 0.9) if len(here) else None for here in in_bins],
        "parabola": [a, b, c],
        "explained": 1 - float(left.var() / sim.var()),
        "lowest_at": -b / (2 * a) if a > 0 else None,
        "lowest": c - b * b / (4 * a) if a > 0 else None,
    }


def histogram(values: Tensor) -> tuple[Tensor, Tensor]:
    """(edges [BINS + 1], density [BINS]) of values [n], without the outermost TAIL at each end."""
    low, high = quantile(values, TAIL), quantile(values, 1 - TAIL)
    if high <= low:
        low, high = low - 0.5, high + 0.5
    edges = torch.linspace(low, high, BINS + 1, dtype=values.dtype)
    counts = torch.histc(values, BINS, low, high)
    return edges, counts / (len(values) * (edges[1] - edges[0]))


def quantile(values: Tensor, q: float) -> float:
    """The q-quantile of values [n], of any n: torch.quantile takes 16 million at most."""
    return float(values.kthvalue(1 + round(q * (len(values) - 1))).values)


def rounded(values: Tensor) -> list[float]:
    """Five significant digits."""
    return [float(f"{value:.5g}") for value in values.tolist()]
