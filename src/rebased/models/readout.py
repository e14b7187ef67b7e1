"""A readout of the last position alone, from which all positions must be told: MAD's decoder for compression."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from rebased.models.norm import LayerNorm

LAYERS = 2


class LastReadout(nn.Module):
    """Features [B,T,D] -> [B,T,D]: those of the last position plus a sinusoid of each, then 2 x (norm, D->D, GELU)."""

    def __init__(self, d_model: int, **factory: Any) -> None:
        super().__init__()
        self.norms = nn.ModuleList(LayerNorm(d_model, **factory) for _ in range(LAYERS))
        self.linears = nn.ModuleList(nn.Linear(d_model, d_model, **factory) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        """Return the features of all positions."""
        y = x[:, -1:] + sinusoids(x.shape[1], x.shape[2]).to(x)
        for norm, linear in zip(self.norms, self.linears, strict=True):
            y = nn.functional.gelu(linear(norm(y)))
        return y


def sinusoids(length: int, width: int) -> Tensor:
    """[length, width]: sines, then cosines, of the position times frequencies from 1 down to 1/10,000."""
    half = (width + 1) // 2
    frequencies = torch.exp(-math.log(10_000) * torch.arange(half) / max(half - 1, 1))
    angles = torch.arange(length).unsqueeze(1) * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=1)[:, :width]
