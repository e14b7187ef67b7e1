"""How near an attention matrix is to the positions that should be attended to: soft IoU, mass, entropy, noise."""

import torch
from torch import Tensor

UNIT = 10_000
"""Weights of matrices are recorded as whole numbers of 1 / UNIT."""


def soft_iou(attention: Tensor, truth: Tensor) -> Tensor:
    """sum min(A, G) / sum max(A, G) over queries and keys: 1 if A is G, 0 if they never overlap.

    attention: A [B,H,Q,N], weights of Q queries on N keys. truth: G [B,Q,N], 1 (or True) at the right keys, else 0.
    Returns [B,H] in the dtype of `attention`. Rows without a right key and without attention count for nothing; if all
    are so, the result is nan.
    """
    _check(attention, truth)
    right = truth.to(attention.dtype).unsqueeze(1)  # [B,1,Q,N]
    return torch.minimum(attention, right).sum((2, 3)) / torch.maximum(attention, right).sum((2, 3))


def target_mass(attention: Tensor, truth: Tensor) -> Tensor:
    """The attention on right keys, as a mean over the queries that have one: A [B,H,Q,N], G [B,Q,N] -> [B,H]."""
    _check(attention, truth)
    right = truth.to(attention.dtype)
    return torch.einsum("bhqn,bqn->bh", attention, right) / right.amax(-1).sum(-1, keepdim=True)


def entropy(attention: Tensor) -> Tensor:
    """-sum p ln p over the keys of each query, p being its attention divided by its sum: [B,H,Q,N] -> [B,H,Q], nats."""
    p = attention / attention.sum(-1, keepdim=True)
    return -torch.xlogy(p, p).sum(-1)


def noisy_tokens(attention: Tensor, truth: Tensor, visible: Tensor) -> Tensor:
    """How many wrong keys have more attention than a uniform share, 1 / visible: -> [B,H,Q] int64.

    attention: A [B,H,Q,N]. truth: G [B,Q,N], 1 (or True) at the right keys. visible: [B,Q] or [Q], how many keys each
    query sees.
    """
    _check(attention, truth)
    share = (1 / visible.to(attention.dtype)).expand(truth.shape[:2])[:, None, :, None]  # [B,1,Q,1]
    return ((attention > share) & ~truth.bool().unsqueeze(1)).sum(-1)


def _check(attention: Tensor, truth: Tensor) -> None:
    if attention.ndim != 4 or attention[:, 0].shape != truth.shape:
        raise ValueError(
            "attention must be [B, H, Q, N] and truth [B, Q, N], cropped to the same queries and keys; they are "
            f"{list(attention.shape)} and {list(truth.shape)}"
        )
