"""The sums over pairs of tokens of the chunked path, and their gradients, in linear time.

A pass goes over the *chunks* of a sequence in order. Tokens called readers see the writers (y, u) of earlier chunks
through a state, the sum of phi(y) u^T, and those of their own chunk pair by pair, one *tile* of readers after another.
Chunks of one tile are the classic chunked form; one chunk for all tokens is tiled quadratic attention. The backward
computes states again, so nothing of the size of a state is stored per chunk.

A call of torch takes several microseconds, whatever it does, so every call works on a *group*: m = G n matrices of G
chunks and n pairs (b, h), in this order. In a group tokens are the last axis of x, y and w: features are then rows, and
no product multiplies with a transposed matrix on its right, which is several times slower without MKL.

Masked pairs are zeros in a product, and zero times NaN is NaN. So on a CPU tiles also end where a sum first meets a NaN
or an infinity (`find_cuts`): no reader of a tile then stands on the wrong side of it.
"""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from rebased.ops.backend import accumulate_dtype
from rebased.ops.polynomial.chunk_plan import find_cuts, plan_pass, spans
from rebased.ops.polynomial.features import Weights, contract, expand, state_order
from rebased.ops.polynomial.similarity import Kernel
from rebased.ops.polynomial.state import feature_count


class RunningState:
    """The sum of phi(y) u^T over the writers (y, u) of all chunks so far, [n, F, W]; None before the first.

    In reverse, queries are the writers, and chunks come last to first.
    """

    def __init__(
        self, kernel: Kernel, K: int, start: Tensor | None, dtype: torch.dtype, tile: int, *, reverse: bool = False
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


At = tuple[slice, slice, slice]
"""Some batch rows, tokens and heads of a tensor [B, T, H, ...]."""


def sums(
    kernel: Kernel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor | None,
    take: Callable[[At, Tensor], None],
    *,
    want_state: bool = False,
) -> Tensor | None:
    """Calls take(at, sums) for every group: sum over j <= i of sim(q_i, k_j) v'_j and what the state adds, [m, L, V+1].

    q, k [B, T, H, K]; v [B, T, H, V]; a state [B, H, F, V+1]. `put` writes what becomes of the sums to a tensor.
    Returns the state after the tokens, None if it is not wanted.
    """
    plan = plan_pass(q, v, kernel.coefficients, reads_first=state is not None, writes_last=want_state)
    dtype = accumulate_dtype(v.dtype)
    after = _empty_state(kernel, q, v) if want_state else None

    def pass_over(b: slice, h: slice) -> None:
        past = RunningState(kernel, q.shape[3], None if state is None else state[b, h], _wide(v), plan.tile)
        for first, last, L in plan.groups:
            at = b, slice(first, last), h
            x, y = (features_first(a[at], L, dtype) for a in (q, k))  # [m,K,L]
            u = beside(v[at], 1.0, L)  # [m,L,W]
            o = torch.empty_like(u)
            for i, j in spans(0, L, plan.tile, find_cuts(u)):
                s = torch.bmm(y[:, :, :j].mT, kernel.scale * x[:, :, i:j])  # [m,J,C]
                sim = kernel.similarity_(s)
                sim[:, i:].triu_()
                _multiply(sim.transpose(1, 2), u[:, :j], o[:, i:j])
            before = past.add(y, u, (last - first) // L, write_last=last < plan.T or want_state)
            if n := len(before):
                o[-n:].add_(past.read(before, x[-n:]))
            take(at, o)
        if after is not None:
            past.copy_to(after[b, h])

    plan.run(pass_over)
    return after


def gradients(
    kernel: Kernel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Callable[[At, int], Tensor],
    state: Tensor | None,
    d_after: Tensor | None,
    needed: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """The gradients of q, k, v and the state, of those that are needed, from those of the sums and of the state after.

    g(at, L) is the gradient of the sums of a group, [m, L, V+1].

        dq_i = sum over j <= i of (g_i . v'_j) d sim(q_i, k_j) / dq_i
        dk_j = sum over i >= j of (g_i . v'_j) d sim(q_i, k_j) / dk_j      dv_j = sum over i >= j of sim(q_i, k_j) g_i

    The first pass goes forward, with all pairs of one chunk and the state for dq; the second goes back, with the state
    for dk and dv.
    """
    need_q, need_k, need_v, need_state = needed
    plan = plan_pass(q, v, kernel.coefficients, reads_first=state is not None, writes_last=need_state)
    dtype = accumulate_dtype(v.dtype)
    dq, dk, dv = (a.new_empty(a.shape, dtype=dtype) if n else None for a, n in zip((q, k, v), needed, strict=False))
    d_state = _empty_state(kernel, q, v) if need_state else None
    unit = kernel.scale * kernel.slope_unit

    def go_forward(b: slice, h: slice) -> None:
        past = RunningState(kernel, q.shape[3], None if state is None else state[b, h], dtype, plan.tile)
        for first, last, L in plan.groups:
            at = b, slice(first, last), h
            x, y = (features_first(a[at], L, dtype) for a in (q, k))  # [m,K,L]
            u, gs = beside(v[at], 1.0, L), g(at, L)  # [m,L,W]
            w, xt = gs.transpose(1, 2).contiguous(), unit * x.transpose(1, 2).contiguous()
            dx, dy, du = torch.empty_like(x), torch.empty_like(xt), u.new_empty(*u.shape[:2], v.shape[3])
            cuts = find_cuts(y.transpose(1, 2)) if need_q else set()
            cuts |= find_cuts(x.transpose(1, 2), reverse=True) if need_k else set()
            cuts |= find_cuts(gs, reverse=True) if need_v else set()
            for i, j in spans(0, L, plan.tile, cuts)[::-1]:  # the last tile first: it sees all writers
                s = torch.bmm(y[:, :, :j].mT, kernel.scale * x[:, :, i:j])  # [m,J,C]
                if need_q or need_k:
                    ds = kernel.times_slope_(torch.bmm(u[:, :j], w[:, :, i:j]), s)
                    ds[:, i:].triu_()
                if need_q:
                    dx[:, :, i:j] = torch.bmm(y[:, :, :j], ds)
                if need_k:
                    _multiply(ds, xt[:, i:j], dy[:, :j], add=j < L)
                if need_v:
                    sim = kernel.similarity_(s)
                    sim[:, i:].triu_()
                    _multiply(sim, gs[:, i:j, :-1], du[:, :j], add=j < L)
            if dq is not None:
                before = past.add(y, u, (last - first) // L, write_last=last < plan.T)
                dx *= unit
                if n := len(before):
                    dx[-n:].add_(past.read_slope(before, x[-n:], w[-n:]))
                put(dq[at], dx.transpose(1, 2))
            if dk is not None:
                put(dk[at], dy)
            if dv is not None:
                put(dv[at], du)

    def go_back(b: slice, h: slice) -> None:
        start, state_dtype = None if d_after is None else d_after[b, h], _wide(v) if need_v else dtype
        later = RunningState(kernel, q.shape[3], start, state_dtype, plan.tile, reverse=True)
        for first, last, L in plan.groups[::-1]:
            at = b, slice(first, last), h
            x, y = (features_first(a[at], L, dtype) for a in (q, k))
            before = later.add(x, g(at, L), (last - first) // L, write_last=first > 0 or need_state)
            n = len(before)
            if n and dv is not None:
                put(dv[at], later.read(before[..., :-1], y[:n]), add=True)
            if n and dk is not None:
                w = beside(v[at], 1.0, L)[:n].transpose(1, 2).contiguous()
                put(dk[at], later.read_slope(before, y[:n], w).transpose(1, 2), add=True)
        if d_state is not None:
            later.copy_to(d_state[b, h])

    def pass_over(b: slice, h: slice) -> None:
        if need_q or need_k or need_v:
            go_forward(b, h)
        if need_state or ((need_k or need_v) and (plan.chunk < plan.T or d_after is not None)):
            go_back(b, h)

    plan.run(pass_over)
    dq, dk, dv = (None if d is None else d.to(a.dtype) for d, a in ((dq, q), (dk, k), (dv, v)))
    return dq, dk, dv, d_state


def _multiply(a: Tensor, b: Tensor, target: Tensor, *, add: bool = False) -> None:
    """Writes a @ b to target, or adds it. Into a slice, bmm would multiply matrix by matrix, which is slow with MKL."""
    if add:
        target.add_(torch.bmm(a, b))
    elif target.is_contiguous():
        torch.bmm(a, b, out=target)
    else:
        target.copy_(torch.bmm(a, b))


def _wide(v: Tensor) -> torch.dtype:
    """The dtype of a state that sums are read from.

    The product of features and state cancels, and o is divided by such a sum. fp64 keeps o and dv right if one key is
    thousands of times larger than the others. dq and dk do not need it.
    """
    return torch.float64 if v.device.type != "mps" else accumulate_dtype(v.dtype)


def _empty_state(kernel: Kernel, q: Tensor, v: Tensor) -> Tensor:
    """[B, H, F, V+1]."""
    (B, _, H, K), V = q.shape, v.shape[3]
    return v.new_empty(B, H, feature_count(K, kernel.coefficients), V + 1, dtype=accumulate_dtype(v.dtype))


def chunks_first(x: Tensor, L: int) -> Tensor:
    """[B, G L, H, K] -> [G, B, H, L, K], a view."""
    return x.unflatten(1, (-1, L)).permute(1, 0, 3, 2, 4)


def features_first(x: Tensor, L: int, dtype: torch.dtype) -> Tensor:
    """[B, G L, H, K] -> [m, K, L], contiguous."""
    return chunks_first(x, L).transpose(3, 4).to(dtype).contiguous().flatten(0, 2)


def beside(a: Tensor, last: Tensor | float, L: int) -> Tensor:
    """[a, last] of a [B, G L, H, V] and last [B, G L, H, 1], or a number: [m, L, V+1], in the dtype of the sums."""
    chunks = chunks_first(a, L)
    both = a.new_empty(*chunks.shape[:4], a.shape[3] + 1, dtype=accumulate_dtype(a.dtype))
    both[..., :-1] = chunks
    both[..., -1:] = chunks_first(last, L) if isinstance(last, Tensor) else last
    return both.flatten(0, 2)


def put(target: Tensor, values: Tensor, *, add: bool = False) -> None:
    """Writes values [m, L, K] to target [B, G L, H, K], or adds them; to its first chunks if values has fewer."""
    (B, _, H, _), (m, L, _) = target.shape, values.shape
    chunks = chunks_first(target, L)[: m // (B * H)]
    values = values.unflatten(0, chunks.shape[:3])
    chunks.add_(values) if add else chunks.copy_(values)
