"""The long convolution as the equation says it, one term per lag: quadratic in T."""

import torch
from torch import Tensor


def direct_sum(x: Tensor, taps: Tensor) -> Tensor:
    """y_t = sum_{s<=t} taps_{t-s} x_s: x [B, T, D], taps [T, D] -> [B, T, D], in the dtype of x."""
    T = x.shape[1]
    padded = torch.cat([torch.zeros_like(x), x], dim=1)
    y = torch.zeros_like(x)
    for lag in range(T):
        y = y + taps[lag] * padded[:, T - lag : 2 * T - lag]
    return y
