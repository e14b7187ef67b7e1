"""Convolutions over time."""

import torch
from torch import Tensor


def short_conv_extend(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor) -> tuple[Tensor, Tensor]:
    """Depth-wise causal convolution of tokens that follow a state, the last W - 1 inputs.

    x [B,T,D], weight [D,W] (the last tap meets the present token), bias [D], state [B,W-1,D].
    """
    width = weight.shape[1]
    if weight.shape[0] != x.shape[2] or state.shape != (x.shape[0], width - 1, x.shape[2]):
        raise ValueError(
            f"x {list(x.shape)} with {width} taps needs weight {[x.shape[2], width]} and state "
            f"{[x.shape[0], width - 1, x.shape[2]]}; got {list(weight.shape)} and {list(state.shape)}"
        )
    T = x.shape[1]
    seen = torch.cat([state.to(x.dtype), x], dim=1)  # [B,W-1+T,D]
    y = seen[:, width - 1 :] * weight[:, -1]
    for tap in range(width - 1):  # W shifted products: no im2col, and faster than a grouped conv1d on a CPU
        y = torch.addcmul(y, seen[:, tap : tap + T], weight[:, tap])
    return (y if bias is None else y + bias), seen[:, T:]


def short_conv(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Depth-wise causal convolution: y_t = bias + sum_w weight[:, W-1-w] x_{t-w}; zeros before the first token."""
    return short_conv_extend(x, weight, bias, x.new_zeros(x.shape[0], weight.shape[1] - 1, x.shape[2]))[0]
