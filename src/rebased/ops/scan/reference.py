"""The selective scan as the equation says it: a loop over T."""

import torch
from torch import Tensor


def scan(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """y [B, T, D] and the state [B, D, N] after the last token.

    x, dt [B, T, D], A [D, N], B and C [B, T, N], h [B, D, N]: the state before the first token. All in one dtype.
    """
    outputs = []
    for t in range(x.shape[1]):
        step = dt[:, t].unsqueeze(-1)  # [B, D, 1]
        h = torch.exp(step * A) * h + step * x[:, t].unsqueeze(-1) * B[:, t].unsqueeze(1)
        outputs.append((h * C[:, t].unsqueeze(1)).sum(-1))
    if not outputs:
        return x * dt * A.sum(1) * (B * C).sum(-1, keepdim=True), h  # empty, and still a function of all to autograd
    return torch.stack(outputs, dim=1), h
