"""The loss on other text during training; in the end the perplexity on all, AR and non-AR tokens, and by distance."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from rebased.analysis.text_scores import ALL, AR, NON_AR, TextScores, distances_of, perplexity
from rebased.data import Windows, spread_rows
from rebased.evaluate.text import evaluate_text
from rebased.files import without_nan
from rebased.models import IGNORE, LanguageModel
from rebased.runs.run_config import Precision
from rebased.train.lm.step import LMStep, to_device
from rebased.train.precision import autocast_dtype
from rebased.train.world import World


def measure(
    model: LanguageModel,
    windows: Windows,
    max_windows: int | None,
    batch_size: int,
    precision: Precision,
    world: World,
    on_progress: Callable[[int, int], None],
) -> dict[str, Any]:
    """Losses and perplexities over `max_windows` windows at even distances (None: all), the same in every process.

    The result is {"tokens", "ar_share", "all", "ar", "non_ar", "by_distance"}, and "windows": "spread" if not all were
    measured. "all", "ar" and "non_ar" are {"loss", "perplexity"}; "by_distance" is what that function returns. A
    number that does not exist is None, such as the loss of AR tokens in a text without any. The windows are divided
    among the processes: each calls `on_progress(done, total)` once before the first and then as its windows are done.
    """
    chosen = spread_rows(len(windows), max_windows)
    rows = chosen[world.rank :: world.size]
    dtype = autocast_dtype(precision)
    on_progress(0, len(rows))
    local = None
    if len(rows):
        local = evaluate_text(model, windows, rows=rows, batch_size=batch_size, dtype=dtype, on_progress=on_progress)
    scores = TextScores.join([part for part in world.gather(local) if part is not None])
    found: dict[str, Any] = {
        "tokens": scores.tokens(),
        **({"windows": "spread"} if len(chosen) < len(windows) else {}),
        "ar_share": scores.ar_share,
        **{name: mean_loss(scores, columns) for name, columns in (("all", ALL), ("ar", AR), ("non_ar", NON_AR))},
        "by_distance": by_distance(scores),
    }
    return without_nan(found)


def by_distance(scores: TextScores) -> list[dict[str, Any]]:
    """AR tokens by distance, nearest first: {"nearest", "farthest", "tokens", "loss", "perplexity"} of each class that
    has tokens. Their bigram was last seen "nearest" to "farthest" tokens ago."""
    classes = []
    for column in range(1, scores.counts.shape[1]):
        (nearest, farthest), columns = distances_of(column), slice(column, column + 1)
        if tokens := scores.tokens(columns):
            classes.append({"nearest": nearest, "farthest": farthest, "tokens": tokens} | mean_loss(scores, columns))
    return classes


def mean_loss(scores: TextScores, columns: slice) -> dict[str, float]:
    """{"loss", "perplexity"} of the tokens in these columns."""
    nats = scores.mean(columns)
    return {"loss": nats, "perplexity": perplexity(nats)}


@torch.no_grad()
def validate(step: LMStep, windows: Windows, rows: Sequence[int], batch_size: int) -> tuple[float, int]:
    """(mean loss in nats per token, labelled tokens) of the windows `rows`, which are divided among the processes; the
    same in every process.

    Sums over batches are taken in fp64, always in the same order. The model is left in the mode it was in (train or
    eval). Compiled models run uncompiled here: to compile the forward pass would take longer than most evaluations.
    """
    loss, world = step.loss, step.world
    training = loss.training
    loss.eval()
    sums, labels = [], 0
    with torch.compiler.set_stance("force_eager"):
        for first in range(0, len(rows), batch_size * world.size):
            local_rows = rows[first : first + batch_size * world.size][world.rank :: world.size]
            # All processes must take part in gathering sharded weights: one without rows computes an ignored batch.
            batch = windows.batch(local_rows if len(local_rows) else rows[:1])
            if not len(local_rows):
                batch = batch._replace(labels=torch.full_like(batch.labels, IGNORE))
            sums.append(loss(*to_device(batch, world.device)).detach())
            labels += int((batch.labels != IGNORE).sum())
    if step.is_sharded:
        loss.reshard()  # a backward pass would do it; until then the optimiser's parameters are not in place
    loss.train(training)
    nats = torch.stack(sums).double().sum()
    total, count = world.total(torch.stack([nats, torch.full_like(nats, labels)])).tolist()
    return total / count, int(count)
