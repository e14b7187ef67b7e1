"""Convolutions in plain torch: a few taps as a sum of shifted products, a filter as long as the sequence by FFT."""

from typing import Any

import torch
from torch import Tensor

from rebased.ops.derivatives import first_derivatives_only


def shifted_sum(seen: Tensor, weight: Tensor) -> Tensor:
    """y_t = sum_w weight[:, w] seen_{t+w}: seen [B, W-1+T, D], weight [D, W] -> [B, T, D], all in one dtype."""
    if torch.compiler.is_compiling():  # which fuses the plain sum; torch 2.11 loses what a backward writes into slices
        T = seen.shape[1] - weight.shape[1] + 1
        return torch.stack([seen[:, i : i + T] * weight[:, i] for i in range(weight.shape[1])]).sum(0)
    return _ShiftedSum.apply(seen, weight)


def fft_convolution(x: Tensor, taps: Tensor) -> Tensor:
    """y_t = sum_{s<=t} taps_{t-s} x_s: x [B, T, D], taps [T, D] -> [B, T, D], all fp32 or fp64."""
    return _FFTConvolution.apply(x, taps)


class _ShiftedSum(torch.autograd.Function):
    """W shifted products: no im2col, and faster than a grouped conv1d on a CPU.

    It has its own backward: autograd would pad every shifted slice to full length and keep W products for the taps.
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
    @first_derivatives_only("short_conv")
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        seen, weight = ctx.saved_tensors
        T = dy.shape[1]
        dseen, dweight = torch.zeros_like(seen), torch.empty_like(weight)
        for tap in range(weight.shape[1]):
            dseen[:, tap : tap + T].addcmul_(dy, weight[:, tap])
            dweight[:, tap] = (seen[:, tap : tap + T] * dy).sum((0, 1))
        return dseen, dweight


class _FFTConvolution(torch.autograd.Function):
    """It has its own backward: autograd would run complex transforms of twice the size instead of real ones."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, taps: Tensor) -> Tensor:
        ctx.save_for_backward(x, taps)
        return _from_spectrum(_spectrum(x) * _spectrum(taps), x.shape[1])

    @staticmethod
    @first_derivatives_only("long_conv")
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, taps = ctx.saved_tensors
        T, spectrum = x.shape[1], _spectrum(dy)
        dtaps = (_spectrum(x).conj_physical_().mul_(spectrum)).sum(0)  # correlations, not convolutions
        dx = spectrum.mul_(_spectrum(taps).conj())
        return _from_spectrum(dx, T), _from_spectrum(dtaps, T)


def _spectrum(x: Tensor) -> Tensor:
    """[..., T, D] -> [..., D, F]: along the contiguous axis, at twice the length so that nothing wraps around."""
    T = x.shape[-2]
    return torch.fft.rfft(x.transpose(-1, -2).contiguous(), n=_fft_length(T))


def _from_spectrum(spectrum: Tensor, T: int) -> Tensor:
    """[..., D, F] -> [..., T, D]."""
    return torch.fft.irfft(spectrum, n=_fft_length(T))[..., :T].transpose(-1, -2).contiguous()


def _fft_length(T: int) -> int:
    """The least power of two that is at least 2 T."""
    return 1 << (2 * T - 1).bit_length()
