"""Where a language model looks at AR tokens: its attention on what followed the same token before, by distance."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rebased.analysis.intervals import bootstrap_means
from rebased.analysis.text_scores import EDGES
from rebased.data import Windows
from rebased.evaluate.ar import ARRule
from rebased.evaluate.attention_layers import captured_inputs, layers_with_maps, sequences_at_once
from rebased.evaluate.text import label_distances
from rebased.mixers import attention_map, mixer_name, positions_in_documents
from rebased.models import IGNORE, LanguageModel


@torch.no_grad()
def probe_text(
    model: LanguageModel,
    windows: Windows,
    rows: Sequence[int],
    *,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """The attention of every layer that has a matrix, at AR tokens of the windows `rows`.

    Say the text has "a b" and later "a": at the second a the model predicts the next token, and b is an AR token (the
    bigram occurred before). Measured is the weight on the position of the first b. The model is in eval mode. Returns
    numbers and lists only:

        {"windows", "seq_len", "tokens", "ar_tokens", "uniform", "best": {"layer", "head"}, "layers": [layer, ...],
         "distances": [{"nearest", "farthest", "tokens", "uniform"}]}
        layer: {"layer", "mixer", "heads", "mean", "interval", "best_head", "best", "best_interval", "by_head",
                "by_distance": [{"mean", "best", "best_interval"}]}

    "uniform" is the weight that a model would give which looks at all visible tokens alike. Intervals are over windows.
    """
    mixers = layers_with_maps(model)
    sequences_at_once(mixers, windows.seq_len, "give a shorter --seq-len")
    device = model.embedding.weight.device
    classes = windows.seq_len.bit_length() + 1
    counts = np.zeros((len(rows), classes))
    uniform = np.zeros((len(rows), classes))
    masses: dict[int, list[Tensor]] = {layer: [] for layer in mixers}  # [H,C] per window
    labelled = 0
    for n, row in enumerate(rows):
        batch = windows.batch([row])
        distance = torch.where(batch.labels != IGNORE, label_distances(batch, ARRule()), 0)[0]  # [T]
        labelled += int((batch.labels != IGNORE).sum())
        at = distance.nonzero().squeeze(1)  # positions of the queries
        target = at + 1 - distance[at]  # what they should look at
        column = torch.bucketize(distance[at], EDGES, right=True)
        cu_seqlens = None if batch.cu_seqlens is None else batch.cu_seqlens.to(device)
        place = torch.arange(windows.seq_len)
        if batch.cu_seqlens is not None:
            place = positions_in_documents(batch.cu_seqlens, batch.tokens)[0]
        counts[n] = np.bincount(column, minlength=classes)
        uniform[n] = np.bincount(column, 1 / (place[at] + 1).double(), minlength=classes)
        with captured_inputs(model) as inputs:
            model.hidden(batch.tokens.to(device), cu_seqlens)
        for layer, mixer in mixers.items():
            A = attention_map(mixer, inputs[layer])[0]  # [H,T,T]
            if cu_seqlens is not None:
                A = within_documents(A, torch.arange(windows.seq_len) - place)
            weights = A[:, at.to(device), target.to(device)].double().cpu()  # [H,n]
            sums = [np.bincount(column, head, minlength=classes) for head in weights]
            masses[layer].append(torch.from_numpy(np.stack(sums)))
        on_progress(n + 1, len(rows))
    if counts.sum() == 0:
        raise ValueError("these windows have no AR token: no bigram occurs twice in one; take more or longer windows")
    used = [c for c in range(1, classes) if counts[:, c].sum()]
    layers = [
        {"layer": layer, "mixer": mixer_name(mixer), **summarise(torch.stack(masses[layer]).numpy(), counts, used)}
        for layer, mixer in mixers.items()
    ]
    first = max(layers, key=lambda each: each["best"])
    return {
        "windows": len(rows),
        "seq_len": windows.seq_len,
        "tokens": labelled,
        "ar_tokens": int(counts.sum()),
        "uniform": float(uniform.sum() / counts.sum()),
        "best": {"layer": first["layer"], "head": first["best_head"]},
        "layers": layers,
        "distances": [
            {
                "nearest": 2 ** (c - 1),
                "farthest": 2**c - 1,
                "tokens": int(counts[:, c].sum()),
                "uniform": float(uniform[:, c].sum() / counts[:, c].sum()),
            }
            for c in used
        ],
    }


def within_documents(A: Tensor, begins: Tensor) -> Tensor:
    """A [H,T,T] over whole rows as it is where documents are apart: other documents get no weight, rows sum to 1.

    begins [T] int: where the document of each token begins.
    """
    begins = begins.to(A.device)
    A = A * (begins.unsqueeze(1) == begins)
    return A / A.sum(-1, keepdim=True).clamp(min=torch.finfo(A.dtype).tiny)


def summarise(masses: np.ndarray, counts: np.ndarray, used: Sequence[int]) -> dict[str, Any]:
    """One layer: sums of weights [W,H,C] and counts of tokens [W,C] over windows, of the distance classes `used`."""
    by_head = masses.sum((0, 2)) / counts.sum()
    best = int(by_head.argmax())
    total = counts.sum(1, keepdims=True)
    whole = bootstrap_means(masses.mean(1).sum(1, keepdims=True), total)[0]
    whole_best = bootstrap_means(masses[:, best].sum(1, keepdims=True), total)[0]
    intervals = bootstrap_means(masses[:, best][:, used], counts[:, used])
    mean, strongest = (each[:, used].sum(0) / counts[:, used].sum(0) for each in (masses.mean(1), masses[:, best]))
    return {
        "heads": masses.shape[1],
        "mean": float(by_head.mean()),
        "interval": list(whole),
        "best_head": best,
        "best": float(by_head[best]),
        "best_interval": list(whole_best),
        "by_head": [round(float(value), 6) for value in by_head],
        "by_distance": [
            {"mean": float(a), "best": float(b), "best_interval": list(interval)}
            for a, b, interval in zip(mean, strongest, intervals, strict=True)
        ],
    }
