"""Softmax cross-entropy of some rows of logits in plain torch, with the gradient written over the logits."""

import torch
from torch import Tensor

IGNORE = -100
"""The target of a row that does not count. torch's cross_entropy has the same default."""


def losses_and_gradient_(logits: Tensor, targets: Tensor, losses: Tensor, scale: float | None) -> None:
    """Writes the loss of each row, and the gradient over the logits.

    Args:
        logits: [rows, vocab], any float dtype. They become scale * (softmax - onehot), and 0 in ignored rows. With
            scale None they stay as they are.
        targets: [rows], integers from 0 to vocab - 1, or IGNORE.
        losses: [rows], fp32 or fp64. They become -log softmax at the target, and 0 in ignored rows.
        scale: factor of the gradient, or None for no gradient.
    """
    counts = targets != IGNORE
    at = torch.where(counts, targets, 0).unsqueeze(1)
    logs = torch.log_softmax(logits, 1, dtype=losses.dtype)
    losses.copy_(torch.where(counts, -logs.gather(1, at).squeeze(1), 0))
    if scale is not None:
        softmax = torch.exp(logs, out=logits if logits.dtype == logs.dtype else logs)
        softmax.scatter_add_(1, at, torch.full_like(at, -1, dtype=softmax.dtype))
        softmax[~counts] = 0
        if scale != 1:
            softmax.mul_(scale)
        if softmax is not logits:
            logits.copy_(softmax)
