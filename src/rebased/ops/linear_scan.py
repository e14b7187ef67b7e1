"""h_t = a_t h_{t-1} + b_t for all t at once, in log depth: the recurrence under the selective scan and WKV.

Time is the first axis here, so that every other token is a plain strided view and a scan can work in place. Each level
combines pairs of tokens, scans the remaining half and fills in the other half. This is about three times the work of a
loop over T, in 4 log2(T) calls instead of T. Nothing is ever divided by a decay.

Decays a > 0 are given as logarithms, and the decay over many tokens is exp of a sum. A product of many a near 1 would
collect the rounding error of a, 3e-8, once per token: 3e-4 over 10,000 tokens.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rebased.ops.derivatives import first_derivatives_only


class Decays(NamedTuple):
    """One decay per token, shape [T, ...]: broadcast over the axes of h where the size is 1."""

    a: Tensor
    log: Tensor

    @classmethod
    def of(cls, log: Tensor) -> "Decays":
        """The decays exp(log), with log [T, ...]."""
        return cls(torch.exp(log), log)


def scan_(decays: Decays, h: Tensor) -> None:
    """Changes h [T, ...] in place: h_t <- a_t h_{t-1} + h_t. The first token stays."""
    T, (a, log) = len(h), decays
    if T <= 1:
        return
    even = T // 2 * 2
    seconds = h[1:even:2].addcmul_(a[1:even:2], h[0:even:2])
    scan_(Decays.of(log[1:even:2] + log[0:even:2]), seconds)
    h[2::2].addcmul_(a[2::2], h[1 : T - 1 : 2])


def scan_back_(decays: Decays, h: Tensor) -> None:
    """Changes h [T, ...] in place, from the last token to the first: h_t <- a_t h_{t+1} + h_t. The last token stays."""
    T, (a, log) = len(h), decays
    if T <= 1:
        return
    odd = T % 2
    firsts = h[odd::2].addcmul_(a[odd::2], h[odd + 1 :: 2])
    scan_back_(Decays.of(log[odd::2] + log[odd + 1 :: 2]), firsts)
    h[1 - odd : T - 1 : 2].addcmul_(a[1 - odd : T - 1 : 2], h[2 - odd :: 2])


def states(decays: Decays, b: Tensor, start: Tensor) -> Tensor:
    """All h_t, with h_{-1} = start: decays and b [T, ...], start [...] -> [T, ...]."""
    h = b.clone(memory_format=torch.contiguous_format)
    h[:1].addcmul_(decays.a[:1], start.unsqueeze(0))
    scan_(decays, h)
    return h


def state_gradients(decays: Decays, dh: Tensor) -> Tensor:
    """g_t = dh_t + a_{t+1} g_{t+1}, the gradient at each h_t through all later ones: dh [T, ...] -> [T, ...]."""
    g = dh.clone(memory_format=torch.contiguous_format)
    scan_back_(Decays(decays.a.roll(-1, 0), decays.log.roll(-1, 0)), g)  # the last decay is never used
    return g


class _LinearScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, log_a: Tensor, b: Tensor, start: Tensor) -> Tensor:
        h = states(Decays.of(log_a), b, start)
        ctx.save_for_backward(log_a, h, start)
        return h

    @staticmethod
    @first_derivatives_only("the chunked path of wkv")
    def backward(ctx: Any, dh: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        log_a, h, start = ctx.saved_tensors
        decays = Decays.of(log_a)
        g = state_gradients(decays, dh)
        before = torch.cat([start.unsqueeze(0), h])[: len(h)]
        d_start = decays.a[0] * g[0] if len(h) else torch.zeros_like(start)
        return (g * before * decays.a).sum_to_size(log_a.shape), g, d_start


def linear_scan(log_a: Tensor, b: Tensor, start: Tensor) -> Tensor:
    """All h_t = exp(log_a_t) h_{t-1} + b_t, with h_{-1} = start.

    Args:
        log_a: [T, ...], logarithms of the decays; any axis after the first may be 1 and is broadcast.
        b: [T, ...], what each token adds. fp32 or fp64; the other arguments have the same dtype.
        start: [...], the state before the first token.

    Returns:
        [T, ...]: the state after each token. Differentiable once in all three; the backward is one more scan, from the
        end.
    """
    return _LinearScan.apply(log_a, b, start)
