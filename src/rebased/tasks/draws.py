"""Draws that tasks share: numbers without replacement, evenly or by weight, and which of them are equal."""

import math

import numpy as np
import torch
from torch import Generator, Tensor


def draw_slots(rows: int, n: int, n_slots: int, alpha: float, generator: Generator) -> Tensor:
    """[rows,n] slots, drawn one after another without replacement, slot g with weight p_g = (g + 1) ** (alpha - 1).

    Exponential clocks with rates p_g ring in the order of successive draws, so the n smallest E_g / p_g are taken.
    Logarithms neither overflow nor underflow at any alpha, and fp64 has practically no ties.
    """
    device = generator.device
    clock = torch.empty(rows, n_slots, dtype=torch.float64, device=device).exponential_(generator=generator).log_()
    clock -= (alpha - 1) * torch.arange(1, n_slots + 1, dtype=torch.float64, device=device).log()
    return clock.topk(n, dim=1, largest=False, sorted=True).indices


def draw_distinct(rows: int, n: int, size: int, generator: Generator) -> Tensor:
    """[rows,n] numbers below size, distinct in each row and in random order: a draw without replacement.

    Independent draws without their repeats have the same distribution, and cost O(n log n) per row instead of O(size).
    """
    # Draws until n are distinct: a sum of n geometric variables. Four standard deviations more are seldom too few.
    misses = [i / (size - i) for i in range(n)]
    spare = sum(misses) + 4 * math.sqrt(sum(miss * (1 + miss) for miss in misses)) + 4
    draws = torch.randint(size, (rows, n + math.ceil(spare)), generator=generator, device=generator.device)
    ordered, order = draws.sort(dim=1, stable=True)  # stable: of equal draws the earliest comes first
    first = torch.ones_like(draws, dtype=torch.bool)
    first.scatter_(1, order[:, 1:], ordered[:, 1:] != ordered[:, :-1])
    rank = first.cumsum(1)  # the r-th distinct draw goes to column r - 1; repeats and the surplus to column n
    column = torch.where(first & (rank <= n), rank - 1, n)
    kept = draws.new_empty(rows, n + 1).scatter_(1, column, draws)[:, :n]
    short = (rank[:, -1] < n).nonzero().squeeze(1)
    if len(short):  # which rows fall short says nothing about which numbers they hold, so a new draw is fair
        kept[short] = draw_distinct(len(short), n, size, generator)
    return kept


def first_equal(numbers: Tensor) -> Tensor:
    """[rows,n] -> [rows,n]: for each number the column in which the row has it first."""
    ordered, order = numbers.sort(dim=1, stable=True)  # stable: of equal numbers the earliest comes first
    new = torch.ones_like(ordered, dtype=torch.bool)
    new[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    column = torch.arange(numbers.shape[1], device=numbers.device)
    leader = torch.where(new, column, 0).cummax(1).values
    return torch.empty_like(order).scatter_(1, order, order.gather(1, leader))


def mix_seed(seed: int, *stream: int) -> int:
    """One 64-bit seed for (seed, stream). seed + epoch would make epoch 1 of seed 42 the epoch 0 of seed 43."""
    if min((seed, *stream)) < 0:
        raise ValueError(f"seeds and counters must be 0 or more, got {(seed, *stream)}")
    return int(np.random.SeedSequence(seed, spawn_key=stream).generate_state(1, np.uint64)[0])
