"""The delta rule token by token, as its equation says it. In fp64, every other path is tested against it."""

import torch
from torch import Tensor

from rebased.ops.polynomial.chunked_recurrence import Rule
from rebased.ops.polynomial.state import key_features, query_features


def recur(
    q: Tensor, k: Tensor, u: Tensor, log_decay: Tensor | None, beta: Tensor | None, state: Tensor, rule: Rule
) -> tuple[Tensor, Tensor]:
    """As chunked_recurrence.recur: (sums [B, T, H, V], state after). Differentiable any number of times."""
    read, known = (query_features(x, rule.coefficients, rule.scale) for x in (q, k))  # [B, T, H, F]
    phi = key_features(k, rule.coefficients)
    sums = []
    for t in range(q.shape[1]):
        if log_decay is not None:
            g = log_decay[:, t]
            state = state * (g if g.ndim == 3 else g.unsqueeze(-1)).exp().unsqueeze(-1)
        x = u[:, t]
        if beta is not None:
            x = beta[:, t].unsqueeze(-1) * (x - (known[:, t].unsqueeze(-2) @ state).squeeze(-2))
        state = state + phi[:, t].unsqueeze(-1) * x.unsqueeze(-2)
        sums.append((read[:, t].unsqueeze(-2) @ state).squeeze(-2))
    return torch.stack(sums, dim=1), state
