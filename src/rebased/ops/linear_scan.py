"""h_t = a_t h_{t-1} + b_t for all t at once: the recurrence under the selective scan and WKV, in log depth.

Time is the first axis here, so that every other token is a plain strided view and a scan can work in place. Each
level folds pairs of tokens together, scans the half that is left and fills in the other: about three times the work of
a loop over T, in 4 log2(T) calls instead of T. Nothing is ever divided by a decay.

Decays a > 0 come as logarithms, and what many tokens leave of the past is exp of a sum. Multiplied out, an a near 1
would keep its rounding, 3e-8, once for every token: 3e-4 where the past is 10,000 tokens deep.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rebased.ops.backend import Backend, choose_path, triton_interpreted


def scan_path(backend: Backend, x: Tensor) -> Backend:
    """The path of a recurrence over x: "reference" (the loop, also under the name "recurrent"), "chunked" or "triton".

    The kernels compute in fp32, so that fp64 is left to the chunked path.
    """
    path = choose_path(backend, x.device)
    if path == "triton" and x.dtype == torch.float64:
        if backend == "triton":
            raise ValueError("the Triton kernels compute in fp32; for float64 inputs use backend='chunked' or 'auto'")
        return "chunked"
    if path == "triton" and not (x.is_cuda or triton_interpreted()):
        raise ValueError(f"the Triton kernels need CUDA tensors; these are on {x.device}: use backend='chunked'")
    return "reference" if path == "recurrent" else path


class Decays(NamedTuple):
    """One a number of tokens, time first; axes of one where h is wider."""

    a: Tensor
    log: Tensor

    @classmethod
    def of(cls, log: Tensor) -> "Decays":
        return cls(torch.exp(log), log)


def scan_(decays: Decays, h: Tensor) -> None:
    """In place: h_t <- a_t h_{t-1} + h_t, first token untouched."""
    T, (a, log) = len(h), decays
    if T == 1:
        return
    even = T // 2 * 2
    seconds = h[1:even:2].addcmul_(a[1:even:2], h[0:even:2])
    scan_(Decays.of(log[1:even:2] + log[0:even:2]), seconds)
    h[2::2].addcmul_(a[2::2], h[1 : T - 1 : 2])


def scan_back_(decays: Decays, h: Tensor) -> None:
    """In place, from the last token to the first: h_t <- a_t h_{t+1} + h_t, last token untouched."""
    T, (a, log) = len(h), decays
    if T == 1:
        return
    odd = T % 2
    firsts = h[odd::2].addcmul_(a[odd::2], h[odd + 1 :: 2])
    scan_back_(Decays.of(log[odd::2] + log[odd + 1 :: 2]), firsts)
    h[1 - odd : T - 1 : 2].addcmul_(a[1 - odd : T - 1 : 2], h[2 - odd :: 2])


def states(decays: Decays, b: Tensor, start: Tensor) -> Tensor:
    """All h_t, with h_{-1} = start: a, b [T,...], start [...] -> [T,...]."""
    h = b.clone(memory_format=torch.contiguous_format)
    h[0].addcmul_(decays.a[0], start)
    scan_(decays, h)
    return h


def state_gradients(decays: Decays, dh: Tensor) -> Tensor:
    """g_t = dh_t + a_{t+1} g_{t+1}: what reaches each h_t through all that follow it."""
    g = dh.clone(memory_format=torch.contiguous_format)
    scan_back_(Decays(decays.a.roll(-1, 0), decays.log.roll(-1, 0)), g)  # the last one is never used
    return g


class _LinearScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, log_a: Tensor, b: Tensor, start: Tensor) -> Tensor:
        h = states(Decays.of(log_a), b, start)
        ctx.save_for_backward(log_a, h, start)
        return h

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dh: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        log_a, h, start = ctx.saved_tensors
        decays = Decays.of(log_a)
        g = state_gradients(decays, dh)
        before = torch.cat([start.unsqueeze(0), h[:-1]])
        return (g * before * decays.a).sum_to_size(log_a.shape), g, decays.a[0] * g[0]


def linear_scan(log_a: Tensor, b: Tensor, start: Tensor) -> Tensor:
    """All h_t = exp(log_a_t) h_{t-1} + b_t, with h_{-1} = start: log_a, b [T,...], start [...] -> [T,...].

    Differentiable: the backward is one more scan, from the end.
    """
    return _LinearScan.apply(log_a, b, start)
