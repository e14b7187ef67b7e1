"""The public functions of the causal depth-wise convolutions: they check their inputs and choose a path."""

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from rebased.ops.backend import Backend, accumulate_dtype, kernel_path
from rebased.ops.convolution.chunked import fft_convolution, shifted_sum
from rebased.ops.convolution.reference import direct_sum
from rebased.ops.derivatives import refuse_transforms

Activation = Literal["silu"]
"""What may follow the short convolution."""


def short_conv_extend(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    *,
    activation: Activation | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """The short convolution of tokens that follow a state, and the state after them.

    Args:
        x, weight, bias, activation, backend: as in short_conv.
        state: [B, W-1, D], the last W - 1 inputs before x; zeros before the first token.

    Returns:
        y [B, T, D] in the dtype of x, and the state [B, W-1, D] after x. y is differentiable in x, weight, bias and
        state.
    """
    if activation not in (None, "silu"):
        raise ValueError(f"activation {activation!r} is unknown; choose 'silu' or None")
    width = weight.shape[1]
    if weight.shape[0] != x.shape[2] or state.shape != (x.shape[0], width - 1, x.shape[2]):
        raise ValueError(
            f"x {list(x.shape)} with {width} taps needs weight {[x.shape[2], width]} and state "
            f"{[x.shape[0], width - 1, x.shape[2]]}; got {list(weight.shape)} and {list(state.shape)}"
        )
    refuse_transforms("short_conv")
    if kernel_path(backend, x, offset=x.shape[1] * max(x.shape[2], x.stride(1))) == "triton":
        from rebased.ops.convolution.gpu import convolve

        tail = torch.cat([state.to(x.dtype), x[:, max(0, x.shape[1] - width + 1) :]], dim=1)
        return convolve(x, weight, bias, state, activation == "silu"), tail[:, tail.shape[1] - width + 1 :]
    seen = torch.cat([state.to(x.dtype), x], dim=1)  # [B, W-1+T, D]
    dtype = accumulate_dtype(x.dtype)
    y = shifted_sum(seen.to(dtype), weight.to(dtype))
    y = (y if bias is None else y + bias.to(dtype)).to(x.dtype)
    return (y if activation is None else functional.silu(y)), seen[:, x.shape[1] :]


def short_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: Activation | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """The causal depth-wise convolution y_t = bias + sum_w weight[:, W-1-w] x_{t-w}, with zeros before the first token.

    Args:
        x: [B, T, D], any float dtype; B and T may be 0. Half precision is computed in fp32.
        weight: [D, W]; the last tap is multiplied with the present token.
        bias: [D], or None for 0.
        activation: "silu" for silu of the convolution, or None.
        backend: "triton" needs a GPU. All others take the same path in plain torch.

    Returns:
        y [B, T, D] in the dtype of x, differentiable in x, weight and bias.
    """
    state = x.new_zeros(x.shape[0], weight.shape[1] - 1, x.shape[2])
    return short_conv_extend(x, weight, bias, state, activation=activation, backend=backend)[0]


def long_conv(x: Tensor, taps: Tensor, skip: Tensor | None = None, *, backend: Backend = "auto") -> Tensor:
    """The causal depth-wise convolution y_t = sum_{s<=t} taps_{t-s} x_s + skip x_t, by FFT on every device.

    Args:
        x: [B, T, D], any float dtype; B and T may be 0. Half precision is computed in fp32.
        taps: [L, D] with L >= T; tap 0 is multiplied with the present token.
        skip: [D], or None for 0.
        backend: "reference" is the direct sum, quadratic in T. All others take the FFT.

    Returns:
        y [B, T, D] in the dtype of x, differentiable once in x, taps and skip.
    """
    if x.ndim != 3 or taps.ndim != 2 or taps.shape[1] != x.shape[2] or x.shape[2] == 0:
        raise ValueError(f"x must be [B,T,D] and taps [L,D]; they are {list(x.shape)} and {list(taps.shape)}")
    T = x.shape[1]
    if len(taps) < T:
        raise ValueError(f"{T} tokens are more than the filter's {len(taps)} taps; build a filter of at least {T}")
    dtype = accumulate_dtype(x.dtype)
    signal, taps = x.to(dtype), taps[:T].to(dtype)
    path = kernel_path(backend, x)
    if path != "reference":
        refuse_transforms("the FFT of long_conv")
    if x.numel() == 0:
        y = signal * taps.sum(0)  # empty, and still a function of x and taps to autograd; no FFT has length 0
    else:
        y = direct_sum(signal, taps) if path == "reference" else fft_convolution(signal, taps)
    return (y if skip is None else torch.addcmul(y, signal, skip.to(dtype))).to(x.dtype)


def long_conv_extend(
    x: Tensor, taps: Tensor, skip: Tensor | None, past: Tensor, *, backend: Backend = "auto"
) -> tuple[Tensor, Tensor]:
    """The long convolution of tokens that follow all those of `past`, and the state after them.

    The state is all inputs so far: it grows with every token.

    Args:
        x, skip, backend: as in long_conv.
        taps: [L, D] with L >= t + T.
        past: [B, t, D], all inputs before x; t may be 0.

    Returns:
        y [B, T, D] in the dtype of x, and the state [B, t+T, D]: past and x.
    """
    if past.ndim != 3 or (past.shape[0], past.shape[2]) != (x.shape[0], x.shape[2]):
        raise ValueError(
            f"this state is of another shape: {list(past.shape)}; x {list(x.shape)} needs {[len(x), 't', x.shape[2]]}"
        )
    T, seen = x.shape[1], torch.cat([past.to(x.dtype), x], dim=1)
    if T != 1 or seen.shape[1] > len(taps):
        return long_conv(seen, taps, skip, backend=backend)[:, past.shape[1] :], seen
    dtype = accumulate_dtype(x.dtype)
    y = torch.einsum("bsd,sd->bd", seen.to(dtype), taps[: seen.shape[1]].flip(0).to(dtype)).unsqueeze(1)
    return (y if skip is None else y + x.to(dtype) * skip.to(dtype)).to(x.dtype), seen
