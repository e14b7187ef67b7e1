"""Causal depth-wise convolutions over time: a few taps by shifted sums, a filter as long as the sequence by FFT."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rebased.ops.backend import Backend
from rebased.ops.linear_scan import scan_path
from rebased.ops.polynomial.state import state_dtype


def short_conv_extend(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, *, backend: Backend = "auto"
) -> tuple[Tensor, Tensor]:
    """Depth-wise causal convolution of tokens that follow a state, the last W - 1 inputs.

    x [B,T,D], weight [D,W] (the last tap meets the present token), bias [D], state [B,W-1,D]. Half precision is
    computed in fp32.
    """
    width = weight.shape[1]
    if weight.shape[0] != x.shape[2] or state.shape != (x.shape[0], width - 1, x.shape[2]):
        raise ValueError(
            f"x {list(x.shape)} with {width} taps needs weight {[x.shape[2], width]} and state "
            f"{[x.shape[0], width - 1, x.shape[2]]}; got {list(weight.shape)} and {list(state.shape)}"
        )
    if scan_path(backend, x) == "triton":
        from rebased.ops.convolution_triton import convolve

        tail = torch.cat([state.to(x.dtype), x[:, max(0, x.shape[1] - width + 1) :]], dim=1)
        return convolve(x, weight, bias, state), tail[:, tail.shape[1] - width + 1 :]
    seen = torch.cat([state.to(x.dtype), x], dim=1)  # [B,W-1+T,D]
    dtype = state_dtype(x.dtype)
    y = _ShiftedSum.apply(seen.to(dtype), weight.to(dtype))
    return (y if bias is None else y + bias.to(dtype)).to(x.dtype), seen[:, x.shape[1] :]


def short_conv(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, backend: Backend = "auto") -> Tensor:
    """Depth-wise causal convolution: y_t = bias + sum_w weight[:, W-1-w] x_{t-w}; zeros before the first token."""
    state = x.new_zeros(x.shape[0], weight.shape[1] - 1, x.shape[2])
    return short_conv_extend(x, weight, bias, state, backend=backend)[0]


class _ShiftedSum(torch.autograd.Function):
    """y_t = sum_w weight[:,w] seen_{t+w}, W shifted products: no im2col, and faster than a grouped conv1d on a CPU.

    Its own backward, since autograd's would pad every shifted slice to full length and keep W products for the taps.
    """

    @staticmethod
    def forward(ctx: Any, seen: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(seen, weight)
        T = seen.shape[1] - weight.shape[1] + 1
        y = seen[:, :T] * weight[:, 0]
        for tap in range(1, weight.shape[1]):
            y.addcmul_(seen[:, tap : tap + T], weight[:, tap])
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        seen, weight = ctx.saved_tensors
        T = dy.shape[1]
        dseen, dweight = torch.zeros_like(seen), torch.empty_like(weight)
        for tap in range(weight.shape[1]):
            dseen[:, tap : tap + T].addcmul_(dy, weight[:, tap])
            dweight[:, tap] = (seen[:, tap : tap + T] * dy).sum((0, 1))
        return dseen, dweight


def long_conv(x: Tensor, taps: Tensor, skip: Tensor | None = None, *, backend: Backend = "auto") -> Tensor:
    """y_t = sum_{s<=t} taps_{t-s} x_s + skip x_t: x [B,T,D], taps [L,D] with L >= T, skip [D].

    By FFT on every device; backend="reference" is the direct sum. Half precision is computed in fp32.
    """
    if x.ndim != 3 or taps.ndim != 2 or taps.shape[1] != x.shape[2] or 0 in x.shape:
        raise ValueError(f"x must be [B,T,D] and taps [L,D]; they are {list(x.shape)} and {list(taps.shape)}")
    T = x.shape[1]
    if len(taps) < T:
        raise ValueError(f"{T} tokens are more than the filter's {len(taps)} taps; build a filter of at least {T}")
    dtype = state_dtype(x.dtype)
    signal, taps = x.to(dtype), taps[:T].to(dtype)
    direct = scan_path(backend, x) == "reference"
    y = _direct_sum(signal, taps) if direct else _FFTConvolution.apply(signal, taps)
    return (y if skip is None else torch.addcmul(y, signal, skip.to(dtype))).to(x.dtype)


def long_conv_extend(
    x: Tensor, taps: Tensor, skip: Tensor | None, past: Tensor, *, backend: Backend = "auto"
) -> tuple[Tensor, Tensor]:
    """long_conv of tokens that follow all those of `past` [B,t,D]. The state after them is past and x: it grows."""
    if past.ndim != 3 or (past.shape[0], past.shape[2]) != (x.shape[0], x.shape[2]):
        raise ValueError(
            f"this state is of another shape: {list(past.shape)}; x {list(x.shape)} needs {[len(x), 't', x.shape[2]]}"
        )
    T, seen = x.shape[1], torch.cat([past.to(x.dtype), x], dim=1)
    if T > 1 or seen.shape[1] > len(taps):
        return long_conv(seen, taps, skip, backend=backend)[:, -T:], seen
    dtype = state_dtype(x.dtype)
    y = torch.einsum("bsd,sd->bd", seen.to(dtype), taps[: seen.shape[1]].flip(0).to(dtype)).unsqueeze(1)
    return (y if skip is None else y + x.to(dtype) * skip.to(dtype)).to(x.dtype), seen


def _direct_sum(x: Tensor, taps: Tensor) -> Tensor:
    T = x.shape[1]
    padded = torch.cat([torch.zeros_like(x), x], dim=1)
    y = torch.zeros_like(x)
    for lag in range(T):
        y = y + taps[lag] * padded[:, T - lag : 2 * T - lag]
    return y


class _FFTConvolution(torch.autograd.Function):
    """Its own backward: autograd's would run complex transforms of twice the size where real ones do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, taps: Tensor) -> Tensor:
        ctx.save_for_backward(x, taps)
        return _from_spectrum(_spectrum(x) * _spectrum(taps), x.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, taps = ctx.saved_tensors
        T, spectrum = x.shape[1], _spectrum(dy)
        dtaps = (_spectrum(x).conj_physical_().mul_(spectrum)).sum(0)  # correlations, not convolutions
        dx = spectrum.mul_(_spectrum(taps).conj())
        return _from_spectrum(dx, T), _from_spectrum(dtaps, T)


def _spectrum(x: Tensor) -> Tensor:
    """[..., T, D] -> [..., D, F]: transforms run along the contiguous axis, at twice the length so nothing wraps."""
    T = x.shape[-2]
    return torch.fft.rfft(x.transpose(-1, -2).contiguous(), n=_fft_length(T))


def _from_spectrum(spectrum: Tensor, T: int) -> Tensor:
    return torch.fft.irfft(spectrum, n=_fft_length(T))[..., :T].transpose(-1, -2).contiguous()


def _fft_length(T: int) -> int:
    """The least power of two that holds a sequence and its echo."""
    return 1 << (2 * T - 1).bit_length()
