"""Shapes and inputs of polynomial attention that tests share."""

from typing import NamedTuple

import torch
from torch import Tensor

from rebased.ops import BASED, REBASED, Coefficients

COEFFICIENTS: tuple[Coefficients, ...] = (REBASED, BASED, (0.3, -0.2, 0.7), (0.0, 1.0, 0.0), (1.0, 0.0, 0.5))


class Shape(NamedTuple):
    """Sizes of q, k [B, T, H, K] and v [B, T, H, V]."""

    B: int
    T: int
    H: int
    K: int
    V: int


def inputs(
    shape: Shape, *, coefficients: Coefficients = REBASED, dtype: torch.dtype = torch.float64, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v that want gradients, and a gradient for the output: normal numbers, the same for every dtype."""
    B, T, H, K, V = shape
    generator = torch.Generator().manual_seed(seed)
    q, k, v, do = (torch.randn(B, T, H, w, generator=generator, dtype=torch.float64) for w in (K, K, V, V))
    if coefficients[2] == 0:  # a linear similarity stays away from zero only where all numbers are positive
        q, k = q.abs(), k.abs()
    q, k, v = (x.to(dtype).requires_grad_() for x in (q, k, v))
    return q, k, v, do.to(dtype)
