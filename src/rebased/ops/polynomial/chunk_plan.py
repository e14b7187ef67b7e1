"""How a pass of the chunked path is divided: chunks, tiles, groups of chunks, rows and threads."""

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from rebased.ops.backend import accumulate_dtype
from rebased.ops.polynomial.state import Coefficients, feature_count
from rebased.ops.threads import run_on_threads

TILE = 128  # readers per tile: below it small matmuls lose half their speed, above it masked pairs are wasted work
PASSES = 32  # multiply-adds a matmul does in the time of the element-wise passes over one pair or one feature
STATE_COST = 1.75  # a multiply-add with a state beside one of two tokens: many are in fp64
CPU_WORDS = 2**22  # numbers that a pass works on at once: fewer are more calls of torch, more leave the caches
ACCELERATOR_WORDS = 2**28
THREADED = 2**24  # multiply-adds from which a pass runs on several threads: about a millisecond


class Plan(NamedTuple):
    """How a pass over T tokens is divided."""

    T: int
    chunk: int
    tile: int
    groups: list[tuple[int, int, int]]  # the first and last token of each group, and the length of its chunks
    rows: list[tuple[slice, slice]]  # the batch rows and heads that are computed at once
    threads: int
    device: torch.device

    def run(self, pass_over: Callable[[slice, slice], None]) -> None:
        """Calls pass_over(b, h) for all rows."""
        run_on_threads(lambda rows: pass_over(*rows), self.rows, self.threads, self.device)


def plan_pass(q: Tensor, v: Tensor, coefficients: Coefficients, *, reads_first: bool, writes_last: bool) -> Plan:
    """The plan for queries q [B, T, H, K] and values v [B, T, H, V].

    reads_first and writes_last: there is a state before the first token, and one is wanted after the last.
    """
    (B, T, H, K), W, F = q.shape, v.shape[3] + 1, feature_count(q.shape[3], coefficients)
    (chunk, tile), cost = _lengths(T, K, W, F, reads_first=reads_first, writes_last=writes_last)
    words = CPU_WORDS if q.device.type == "cpu" else ACCELERATOR_WORDS
    features = K * K + 2 * F if chunk < T or reads_first or writes_last else 2 * K
    matrices = max(1, words // (tile * (features + 3 * chunk + 4 * W)))
    threads = thread_count(q.device, B * T * H * cost)
    rows = min(matrices, -(-B * H // threads))
    whole = T - T % chunk
    groups = [(i, j, chunk) for i, j in spans(0, whole, chunk * max(1, matrices // rows))]
    groups += [(whole, T, T - whole)] if whole < T else []
    return Plan(T, chunk, tile, groups, row_groups(B, H, rows), threads, q.device)


def _lengths(T: int, K: int, W: int, F: int, *, reads_first: bool, writes_last: bool) -> tuple[tuple[int, int], float]:
    """The lengths (chunk, tile) with the lowest cost, and that cost in multiply-adds per token.

    A pair costs K + W, and the readers of a tile see (chunk + tile) / 2 writers on average. To read the state and to
    write it cost F W each, in all chunks but the first and the last. The sum is monotone in the number of chunks, so
    the best chunk is one tile or all tokens. All tokens are best up to T = 850 at K = 16, and T = 32,000 at K = 128.
    """
    tile = min(TILE, T)

    def cost(chunk: int) -> float:
        n = -(-T // chunk)
        state_uses = (2 * (n - 1) + reads_first + writes_last) / n
        return (K + W + PASSES) * (chunk + tile) / 2 + STATE_COST * F * (W + PASSES) * state_uses

    chunk = tile if cost(tile) <= cost(T) else T
    return (chunk, tile), cost(chunk)


def thread_count(device: torch.device, work: float) -> int:
    """How many threads share the rows of a pass; 1 where torch itself uses its threads well: MKL gives each thread
    whole matmuls of a batch, others divide each matmul."""
    if device.type != "cpu" or work < THREADED or torch.backends.mkl.is_available():
        return 1
    return torch.get_num_threads()


def row_groups(B: int, H: int, rows: int) -> list[tuple[slice, slice]]:
    """Slices of batch and heads with about `rows` pairs (b, h) each."""
    batch, heads = max(1, rows // H), min(rows, H)
    return [(slice(b, b + batch), slice(h, h + heads)) for b in range(0, B, batch) for h in range(0, H, heads)]


def spans(start: int, stop: int, length: int, cuts: Iterable[int] = ()) -> list[tuple[int, int]]:
    """(first, last) of each run of at most `length` tokens from start to stop, which also ends at each of `cuts`."""
    inside = [cut for cut in cuts if start < cut < stop]
    return list(pairwise(sorted({*range(start, stop, length), *inside, stop})))


def find_cuts(u: Tensor, *, reverse: bool = False) -> set[int]:
    """Where tiles of a chunk must end so that no NaN or infinity of u [m, L, W] reaches a token it may not reach.

    A product keeps the columns of u apart, and a sum that has met a NaN or an infinity is never finite again. So the
    first one in a matrix and column counts: it must be the first token of its tile, or in a reverse pass the last one.
    The usual answer, none, costs one sum over u. Only a CPU is asked: elsewhere the host would wait.
    """
    if u.device.type != "cpu" or u.sum(dtype=accumulate_dtype(u.dtype)).isfinite():
        return set()
    odd = u.isfinite().logical_not_()
    odd = odd.flip(1) if reverse else odd
    first = odd.to(torch.uint8).argmax(1)[odd.any(1)].unique().tolist()
    return {u.shape[1] - at for at in first} if reverse else set(first)
