"""The state of the chunked path, which grows from chunk to chunk, and what tokens read from it."""

from itertools import pairwise

import torch
from torch import Tensor

from rebased.ops.polynomial.features import Weights, contract, expand, state_order
from rebased.ops.polynomial.similarity import AnyKernel
from rebased.ops.polynomial.state import feature_count


class RunningState:
    """The sum of phi(y) u^T over the writers (y, u) of all chunks so far, [n, F, W]; None before the first.

    In reverse, queries are the writers, and chunks come last to first.
    """

    def __init__(
        self, kernel: AnyKernel, K: int, start: Tensor | None, dtype: torch.dtype, tile: int, *, reverse: bool
    ) -> None:
        """start [B, H, F, W], in the order of state.py, or None. Features are made for `tile` tokens at once."""
        self.coefficients, self.K, self.dtype, self.tile, self.reverse = kernel.coefficients, K, dtype, tile, reverse
        self.of_writers: Weights | None = kernel.weights if reverse else None
        self.of_readers: Weights | None = None if reverse else kernel.weights
        self.sum: Tensor | None = None
        if start is not None:
            order = state_order(K, self.coefficients, start.device)
            rows = start.flatten(0, 1).to(dtype)
            self.sum = torch.empty_like(rows).index_copy_(1, order, rows)

    def add(self, y: Tensor, u: Tensor, chunks: int, *, write_last: bool) -> Tensor:
        """Adds the chunks of a group, y [m, K, L] and u [m, L, W], and returns the sum before each: [m, F, W].

        Before the first chunk there may be no sum; then n matrices less are returned. Without write_last the last
        chunk is not added: nothing reads it.
        """
        (m, K, L), W = y.shape, u.shape[2]
        n, starts, writes = m // chunks, int(self.sum is not None), chunks if write_last else chunks - 1
        if starts + writes == 0:
            return y[:0]
        states = u.new_empty(starts + writes, n, feature_count(K, self.coefficients), W, dtype=self.dtype)
        order = range(len(states))[:: -1 if self.reverse else 1]
        if self.sum is not None:
            states[order[0]] = self.sum
        if writes:
            y, u = (a[-writes * n :] if self.reverse else a[: writes * n] for a in (y, u))
            new = (states[:writes] if self.reverse else states[starts:]).flatten(0, 1)
            for i in range(0, L, self.tile):
                phi = expand(y[:, :, i : i + self.tile], self.coefficients, self.dtype, self.of_writers)
                us = u[:, i : i + self.tile].to(self.dtype)
                torch.bmm(phi, us, out=new) if i == 0 else new.baddbmm_(phi, us)
        for at, following in pairwise(order):
            states[following].add_(states[at])  # not +=, which would also copy the sum onto itself
        self.sum = states[order[-1]]
        reads = chunks if starts else chunks - 1
        return (states[len(states) - reads :] if self.reverse else states[:reads]).flatten(0, 1)

    def read(self, before: Tensor, x: Tensor) -> Tensor:
        """sum_j sim(x_i, y_j) u_j of readers x [m, K, L], from the sums before their chunks [m, F, W]: [m, L, W]."""
        out = x.new_empty(len(x), x.shape[2], before.shape[2])
        for i in range(0, x.shape[2], self.tile):
            phi = expand(x[:, :, i : i + self.tile], self.coefficients, self.dtype, self.of_readers)
            out[:, i : i + self.tile] = torch.bmm(phi.transpose(1, 2), before)
        return out

    def read_slope(self, before: Tensor, x: Tensor, w: Tensor) -> Tensor:
        """sum_j (w_i . u_j) d sim(x_i, y_j) / dx_i of readers x [m, K, L] and w [m, W, L]: [m, K, L]."""
        dx, before = torch.empty_like(x), before.to(w.dtype)
        for i in range(0, x.shape[2], self.tile):
            d_phi = torch.bmm(before, w[:, :, i : i + self.tile])
            dx[:, :, i : i + self.tile] = contract(
                d_phi, x[:, :, i : i + self.tile], self.coefficients, self.of_readers
            )
        return dx

    def copy_to(self, after: Tensor) -> None:
        """Writes the sum to after [B, H, F, W], in the order of state.py."""
        assert self.sum is not None
        order = state_order(self.K, self.coefficients, after.device)
        after.copy_(self.sum.index_select(1, order).unflatten(0, after.shape[:2]))
