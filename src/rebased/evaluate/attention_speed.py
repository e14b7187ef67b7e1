"""How long ReBased's operator and torch's softmax attention take on this machine, by sequence length."""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rebased.ops import REBASED, poly_attention

LENGTHS = (256, 512, 1024, 2048, 4096, 8192)
HEADS, KEY_WIDTH, VALUE_WIDTH = 2, 16, 64  # of ReBased; heads of softmax attention have keys as wide as values
ENOUGH = 0.25  # seconds for which each call is repeated; once at least. Two that are compared take turns


class Timing(NamedTuple):
    """Milliseconds for one sequence of T tokens: the fastest of a few calls."""

    T: int
    poly: float  # poly_attention, forward
    softmax: float  # scaled_dot_product_attention, forward
    poly_both: float  # forward and backward
    softmax_both: float


def time_attention(
    lengths: Sequence[int] = LENGTHS, on_progress: Callable[[int], None] = lambda T: None
) -> list[Timing]:
    """Return the times for sequences of these lengths: fp32, causal, on the CPU, with torch's number of threads.

    `on_progress(T)` is called before each length.
    """
    time_one(min(lengths))  # what is done once per process is not counted
    found = []
    for T in lengths:
        on_progress(T)
        found.append(time_one(T))
    return found


def time_one(T: int) -> Timing:
    """Return the times for sequences of T tokens."""
    q, k = (torch.randn(1, T, HEADS, KEY_WIDTH, requires_grad=True) for _ in range(2))
    wide_q, wide_k, v = (torch.randn(1, T, HEADS, VALUE_WIDTH, requires_grad=True) for _ in range(3))
    do = torch.randn(1, T, HEADS, VALUE_WIDTH)

    def poly() -> Tensor:
        return poly_attention(q, k, v, coefficients=REBASED)

    def softmax() -> Tensor:
        q, k, values = wide_q.transpose(1, 2), wide_k.transpose(1, 2), v.transpose(1, 2)
        return scaled_dot_product_attention(q, k, values, is_causal=True).transpose(1, 2)

    with torch.no_grad():
        forward = _fastest(poly, softmax)
    return Timing(T, *forward, *_fastest(lambda: poly().backward(do), lambda: softmax().backward(do)))


def _fastest(*calls: Callable[[], object]) -> list[float]:
    """Milliseconds of each call, the fastest of its turns. Other programs on the machine slow all calls alike."""
    times: list[list[float]] = [[] for _ in calls]
    while not times[0] or min(map(sum, times)) < ENOUGH:
        for call, taken in zip(calls, times, strict=True):
            started = time.perf_counter()
            call()
            taken.append(time.perf_counter() - started)
    return [min(taken) * 1e3 for taken in times]
