"""What the paper's Table 2 asks of a trained model, as the record keeps it: perplexity of all, AR and non-AR tokens."""

from typing import Any

import torch

from rebased.models import LanguageModel
from rebased.tasks.perplexity import ALL, AR, NON_AR, TextScores, perplexity
from rebased.tasks.text import Windows
from rebased.train.text.evaluate import evaluate_text
from rebased.train.text.world import World


def measure(
    model: LanguageModel, windows: Windows, most: int | None, batch_size: int, precision: str, world: World
) -> dict[str, Any]:
    """Over the first windows (none: all), which the processes share; every process gets the same answer."""
    rows = range(len(windows))[:most][world.rank :: world.size]
    dtype = torch.bfloat16 if precision == "bf16" else None
    mine = evaluate_text(model, windows, rows=rows, batch_size=batch_size, dtype=dtype) if len(rows) else None
    scores = TextScores.join([part for part in world.gather(mine) if part is not None])
    return {
        "tokens": scores.tokens(),
        "ar_share": scores.ar_share,
        **{
            name: {"loss": scores.mean(columns), "perplexity": perplexity(scores.mean(columns))}
            for name, columns in (("all", ALL), ("ar", AR), ("non_ar", NON_AR))
        },
    }
