"""What the paper's Table 2 asks of a trained model, as the record keeps it: perplexity of all, AR and non-AR tokens."""

import math
from collections.abc import Callable
from typing import Any

import torch

from rebased.analysis.text_scores import ALL, AR, NON_AR, TextScores, perplexity
from rebased.data import Windows
from rebased.evaluate.text import evaluate_text
from rebased.models import LanguageModel
from rebased.train.world import World


def measure(
    model: LanguageModel,
    windows: Windows,
    most: int | None,
    batch_size: int,
    precision: str,
    world: World,
    tell: Callable[[int, int], None],
) -> dict[str, Any]:
    """Over the first windows (none: all), which the processes share; every process gets the same answer, None where
    there is no number, such as of AR tokens where none repeats. `tell` hears how many of how many of its own are
    done."""
    rows = range(len(windows))[:most][world.rank :: world.size]
    dtype = torch.bfloat16 if precision == "bf16" else None
    tell(0, len(rows))
    mine = None
    if len(rows):
        mine = evaluate_text(model, windows, rows=rows, batch_size=batch_size, dtype=dtype, on_progress=tell)
    scores = TextScores.join([part for part in world.gather(mine) if part is not None])
    return {
        "tokens": scores.tokens(),
        "ar_share": finite(scores.ar_share),
        **{
            name: {"loss": finite(scores.mean(columns)), "perplexity": finite(perplexity(scores.mean(columns)))}
            for name, columns in (("all", ALL), ("ar", AR), ("non_ar", NON_AR))
        },
    }


def finite(number: float) -> float | None:
    """As JSON can keep it."""
    return number if math.isfinite(number) else None
