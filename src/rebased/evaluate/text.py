"""How well a model predicts text: the loss of every token, summed for AR and other tokens."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from rebased.analysis.text_scores import TextScores
from rebased.data import TextBatch, Windows
from rebased.evaluate.ar import ARRule
from rebased.mixers import eval_mode, positions_in_documents
from rebased.models import IGNORE, LanguageModel
from rebased.ops.backend import autocast

LOGITS_AT_ONCE = 2**25  # 128 MiB in fp32


@torch.no_grad()
def evaluate_text(
    model: LanguageModel,
    windows: Windows,
    *,
    ar: ARRule | None = None,
    rows: Sequence[int] | None = None,
    batch_size: int = 8,
    dtype: torch.dtype | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> TextScores:
    """The summed token losses of a model on windows of text, on the CPU.

    ar: which tokens count as AR. Default: repeated bigrams, as in the paper.
    rows: indices of the windows to score. Default: all.
    batch_size: windows per forward pass.
    dtype: precision of the layers (autocast). Default: that of the weights. The head and the losses are always at least
        fp32, the sums fp64.
    on_progress: called as on_progress(done, total) after each batch, with numbers of windows.

    The model's training or eval mode is restored afterwards.
    """
    rows = range(len(windows)) if rows is None else rows
    if not len(rows):
        raise ValueError("there is no window to score: the split holds less text than one window; shorten seq_len")
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    ar = ar or ARRule()
    device = model.embedding.weight.device
    scores = []
    with eval_mode(model):
        for first in range(0, len(rows), batch_size):
            batch = windows.batch(rows[first : first + batch_size])
            tokens, labels, documents = batch
            documents = None if documents is None else documents.to(device)
            losses = token_losses(model, tokens.to(device), labels.to(device), documents, dtype=dtype)
            scores.append(TextScores.of(losses.cpu(), label_distances(batch, ar), labels != IGNORE))
            on_progress(min(first + batch_size, len(rows)), len(rows))
    return TextScores.join(scores)


def token_losses(
    model: LanguageModel,
    tokens: Tensor,
    labels: Tensor,
    cu_seqlens: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
    logits_at_once: int = LOGITS_AT_ONCE,
) -> Tensor:
    """-ln p(label) at each position: tokens, labels [B,T] int64 -> [B,T] fp32 (fp64 for a model in fp64), 0 if IGNORE.

    cu_seqlens [n+1] int32 says where documents begin in the B*T tokens; None if rows are one document. dtype is the
    precision of the layers (autocast). At most `logits_at_once` logits are in memory, or those of one position if these
    are more: [B,T,vocab] is never built.
    """
    if tokens.shape != labels.shape:
        raise ValueError(f"tokens {list(tokens.shape)} and labels {list(labels.shape)} must have one shape")
    with autocast(dtype, tokens.device):
        hidden = model.hidden(tokens, cu_seqlens)  # [B,T,D]
    asked = labels != IGNORE
    weight = model.embedding.weight
    exact = torch.promote_types(weight.dtype, torch.float32)
    losses = torch.zeros(labels.shape, dtype=exact, device=labels.device)
    rows, targets = hidden[asked].to(weight.dtype), labels[asked]  # [n,D], [n]
    at_once = max(logits_at_once // weight.shape[0], 1)
    found = [
        functional.cross_entropy(model.logits(some).to(exact), target, reduction="none")
        for some, target in zip(rows.split(at_once), targets.split(at_once), strict=True)
    ]
    losses[asked] = torch.cat(found)
    return losses


def label_distances(batch: TextBatch, ar: ARRule) -> Tensor:
    """The distances of `ar` for the labels of a batch, [B,T] int64. Where a label is IGNORE the value means nothing.

    Label t is token t + 1 of the window, so the labels' row is the tokens' row plus the last label.
    """
    tokens, labels, cu_seqlens = batch
    stream = torch.cat([tokens, labels[:, -1:].clamp(min=0)], dim=1)  # [B,T+1]
    begins = None
    if cu_seqlens is not None:  # a label that is not IGNORE belongs to the document of its token
        begins = torch.arange(tokens.shape[1]) - positions_in_documents(cu_seqlens, tokens)
        begins = torch.cat([begins, begins[:, -1:]], dim=1)
    return ar.distances(stream, begins)[:, 1:]
