"""How well a model foretells text: the log-loss of every token, added up for recall targets and the others."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import functional

from rebased.analysis.text_scores import TextScores
from rebased.data import TextBatch, Windows
from rebased.evaluate.ar import ARRule
from rebased.mixers import positions_in_documents
from rebased.models import IGNORE, LanguageModel

LOGITS = 2**25
"""How many logits stand in memory at once: 128 MiB in fp32, whatever the window and the vocabulary."""


@torch.no_grad()
def evaluate_text(
    model: LanguageModel,
    windows: Windows,
    *,
    ar: ARRule | None = None,
    rows: Sequence[int] | None = None,
    batch_size: int = 8,
    dtype: torch.dtype | None = None,
    progress: Callable[[int], None] | None = None,
) -> TextScores:
    """Score windows of text, all or the `rows` of one process. The model is left in the mode it was in.

    ar: what counts as associative recall; default: repeated bigrams, as in the paper.
    dtype: compute the layers in this precision (autocast); the head and the losses are fp32, the sums fp64.
    progress: called with the number of windows scored so far.
    """
    rows = range(len(windows)) if rows is None else rows
    if not len(rows):
        raise ValueError("there is no window to score: the split holds less text than one window; shorten seq_len")
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    ar = ar or ARRule()
    device = model.embedding.weight.device
    parts = []
    with eval_mode(model):
        for first in range(0, len(rows), batch_size):
            batch = windows.batch(rows[first : first + batch_size])
            tokens, labels, documents = batch
            documents = None if documents is None else documents.to(device)
            losses = token_losses(model, tokens.to(device), labels.to(device), documents, dtype=dtype)
            parts.append(TextScores.of(losses.cpu(), label_distances(batch, ar), labels != IGNORE))
            if progress is not None:
                progress(min(first + batch_size, len(rows)))
    return TextScores.join(parts)


@contextmanager
def eval_mode(model: LanguageModel) -> Iterator[None]:
    """No dropout within the block; afterwards the model is in the mode it was in."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def token_losses(
    model: LanguageModel,
    tokens: Tensor,
    labels: Tensor,
    cu_seqlens: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """-ln p(label) at each position: tokens, labels [B,T] -> [B,T] fp32 (fp64 for a model in fp64), 0 where IGNORE.

    Logits are made for some positions at a time: [B,T,vocab] is never built.
    """
    if tokens.shape != labels.shape:
        raise ValueError(f"tokens {list(tokens.shape)} and labels {list(labels.shape)} must have one shape")
    with torch.autocast(tokens.device.type, dtype=dtype, enabled=dtype is not None):
        hidden = model.hidden(tokens, cu_seqlens)  # [B,T,D]
    asked = labels != IGNORE
    weight = model.embedding.weight
    exact = torch.promote_types(weight.dtype, torch.float32)
    losses = torch.zeros(labels.shape, dtype=exact, device=labels.device)
    rows, targets = hidden[asked].to(weight.dtype), labels[asked]  # [n,D], [n]
    block = max(LOGITS // weight.shape[0], 1)
    parts = [
        functional.cross_entropy(model.logits(some).to(exact), target, reduction="none")
        for some, target in zip(rows.split(block), targets.split(block), strict=True)
    ]
    losses[asked] = torch.cat(parts)
    return losses


def label_distances(batch: TextBatch, ar: ARRule) -> Tensor:
    """The rule's distances of the labels [B,T]: label t is token t+1, the last one a token that stands nowhere else.
    Where a label is IGNORE, and where a window's last one is missing, the answer means nothing."""
    tokens, labels, cu_seqlens = batch
    stream = torch.cat([tokens, labels[:, -1:].clamp(min=0)], dim=1)  # [B,T+1]
    begins = None
    if cu_seqlens is not None:  # a label, where there is one, is of its token's document
        begins = torch.arange(tokens.shape[1]) - positions_in_documents(cu_seqlens, tokens)
        begins = torch.cat([begins, begins[:, -1:]], dim=1)
    return ar.distances(stream, begins)[:, 1:]
