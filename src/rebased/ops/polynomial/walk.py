"""The walks of the chunked path: sums over pairs of tokens, and their gradients, in linear time.

A walk divides time into *chunks*. Tokens called readers see the writers (y, u) of other chunks through a state, the sum
of phi(y) u^T over the chunks that the walk has met, and those of their own chunk pair by pair, one *tile* of readers
after another. Chunks of one tile are the classic chunked form; one chunk for all tokens is tiled quadratic attention.
The backward computes states again, so nothing of the size of a state is stored per chunk.

A call of torch takes several microseconds, whatever it does, so every call works on a *group*: m = G n matrices of G
chunks and n pairs (b, h), in this order. In a group tokens are the last axis of x, y and w: features are then rows, and
no product multiplies with a transposed matrix on its right, which is several times slower without MKL.

Masked pairs are zeros in a product, and zero times NaN is NaN. So on a CPU tiles also end where a sum first meets a NaN
or an infinity (`_cuts`): no reader of a tile then stands on the wrong side of it.
"""

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from rebased.ops.backend import accumulate_dtype, splits_matmuls
from rebased.ops.polynomial.features import contract, expand, state_order
from rebased.ops.polynomial.similarity import AnyKernel
from rebased.ops.polynomial.state import feature_count
from rebased.ops.threads import run_on_threads

TILE = 128  # readers per tile: below it small matmuls lose half their speed, above it masked pairs are wasted work
PASSES = 32  # multiply-adds a matmul does in the time of the element-wise passes over one pair or one feature
CPU_WORDS = 2**22  # numbers that a walk works on at once, so that they stay in a cache; an accelerator needs more
ACCELERATOR_WORDS = 2**28
THREADED = 2**24  # multiply-adds from which a walk runs on several threads: about a millisecond


At = tuple[slice, slice, slice]
"""Some batch rows, tokens and heads of a tensor [B, T, H, ...]."""


def sums(
    kernel: AnyKernel,
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
    plan = _plan(kernel, q, v, reads_first=state is not None, writes_last=want_state)
    dtype = accumulate_dtype(v.dtype)
    after = _empty_state(kernel, q, v) if want_state else None

    def walk(b: slice, h: slice) -> None:
        past = _State(kernel, q.shape[3], None if state is None else state[b, h], _wide(v), reverse=False)
        for first, last, L in plan.groups:
            at = b, slice(first, last), h
            x, y = (features_first(a[at], L, dtype) for a in (q, k))  # [m,K,L]
            u = _with_ones(v[at], L)  # [m,L,W]
            o = torch.empty_like(u)
            for i, j in _spans(0, L, plan.tile, _cuts(u)):
                s = _scores(y[:, :, :j], kernel.scale * x[:, :, i:j])  # [m,J,C]
                sim = kernel.similarity_(s)
                sim[:, i:].triu_()
                o[:, i:j].baddbmm_(sim.transpose(1, 2), u[:, :j], beta=0)
            before = past.walk(y, u, (last - first) // L, write_last=last < plan.T or want_state)
            if n := len(before):
                o[-n:] += past.read(before, x[-n:])
            take(at, o)
        if after is not None:
            past.copy_to(after[b, h])

    plan.run(walk)
    return after


def gradients(
    kernel: AnyKernel,
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

    The first walk goes forward, with all pairs of one chunk and the state for dq; the second goes back, with the state
    for dk and dv.
    """
    need_q, need_k, need_v, need_state = needed
    plan = _plan(kernel, q, v, reads_first=state is not None, writes_last=need_state)
    dtype = accumulate_dtype(v.dtype)
    dq, dk, dv = (a.new_empty(a.shape, dtype=dtype) if n else None for a, n in zip((q, k, v), needed, strict=False))
    d_state = _empty_state(kernel, q, v) if need_state else None
    unit = kernel.scale * kernel.slope_unit

    def walk_forward(b: slice, h: slice) -> None:
        past = _State(kernel, q.shape[3], None if state is None else state[b, h], dtype, reverse=False)
        for first, last, L in plan.groups:
            at = b, slice(first, last), h
            x, y = (features_first(a[at], L, dtype) for a in (q, k))  # [m,K,L]
            u, gs = _with_ones(v[at], L), g(at, L)  # [m,L,W]
            w, xt = gs.transpose(1, 2).contiguous(), unit * x.transpose(1, 2).contiguous()
            dx, dy, du = torch.empty_like(x), torch.empty_like(xt), torch.empty_like(u[..., :-1])
            met = [(y, False)] * need_q + [(x, True)] * need_k
            cuts = {cut for a, reverse in met for cut in _cuts(a.transpose(1, 2), reverse)}
            cuts |= set(_cuts(gs, reverse=True) if need_v else ())
            for i, j in _spans(0, L, plan.tile, cuts)[::-1]:  # the last tile first: it sees all writers
                beta = float(j < L)
                s = _scores(y[:, :, :j], kernel.scale * x[:, :, i:j])  # [m,J,C]
                if need_q or need_k:
                    ds = kernel.times_slope_(torch.bmm(u[:, :j], w[:, :, i:j]), s)
                    ds[:, i:].triu_()
                if need_q:
                    dx[:, :, i:j] = torch.bmm(y[:, :, :j], ds)
                if need_k:
                    dy[:, :j].baddbmm_(ds, xt[:, i:j], beta=beta)
                if need_v:
                    sim = kernel.similarity_(s)
                    sim[:, i:].triu_()
                    du[:, :j].baddbmm_(sim, gs[:, i:j, :-1], beta=beta)
            if dq is not None:
                before = past.walk(y, u, (last - first) // L, write_last=last < plan.T)
                dx *= unit
                if n := len(before):
                    dx[-n:] += past.read_slope(before, x[-n:], w[-n:])
                put(dq[at], dx.transpose(1, 2))
            if dk is not None:
                put(dk[at], dy)
            if dv is not None:
                put(dv[at], du)

    def walk_back(b: slice, h: slice) -> None:
        later = _State(
            kernel, q.shape[3], None if d_after is None else d_after[b, h], _wide(v) if need_v else dtype, reverse=True
        )
        for first, last, L in plan.groups[::-1]:
            at = b, slice(first, last), h
            x, y = (features_first(a[at], L, dtype) for a in (q, k))
            before = later.walk(x, g(at, L), (last - first) // L, write_last=first > 0 or need_state)
            n = len(before)
            if n and dv is not None:
                put(dv[at], later.read(before[..., :-1], y[:n]), add=True)
            if n and dk is not None:
                w = _with_ones(v[at], L)[:n].transpose(1, 2).contiguous()
                put(dk[at], later.read_slope(before, y[:n], w).transpose(1, 2), add=True)
        if d_state is not None:
            later.copy_to(d_state[b, h])

    def walk(b: slice, h: slice) -> None:
        walk_forward(b, h)
        if need_state or ((need_k or need_v) and (plan.chunk < plan.T or d_after is not None)):
            walk_back(b, h)

    plan.run(walk)
    dq, dk, dv = (None if d is None else d.to(a.dtype) for d, a in ((dq, q), (dk, k), (dv, v)))
    return dq, dk, dv, d_state


class _State:
    """The sum of phi(y) u^T over the writers (y, u) of a walk, [n, F, W]. In a reverse walk queries are the writers."""

    def __init__(self, kernel: AnyKernel, K: int, start: Tensor | None, dtype: torch.dtype, *, reverse: bool) -> None:
        self.coefficients, self.K, self.dtype, self.reverse = kernel.coefficients, K, dtype, reverse
        self.of_writers, self.of_readers = (kernel.weights, None) if reverse else (None, kernel.weights)
        self.sum: Tensor | None = None
        if start is not None:
            order = state_order(K, self.coefficients, start.device)
            self.sum = torch.empty_like(start.flatten(0, 1), dtype=dtype).index_copy_(1, order, start.flatten(0, 1).to(dtype))

    def walk(self, y: Tensor, u: Tensor, chunks: int, *, write_last: bool) -> Tensor:
        """Adds a group of chunks, y [m, K, L] and u [m, L, W], and returns the sum before each: [m, F, W].

        Before the first chunk of all there is no sum: then there are n fewer.
        """
        (m, K, L), W = y.shape, u.shape[2]
        n, starts, writes = m // chunks, int(self.sum is not None), chunks if write_last else chunks - 1
        states = u.new_empty(starts + writes, n, feature_count(K, self.coefficients), W, dtype=self.dtype)
        order = range(len(states))[:: -1 if self.reverse else 1]
        if self.sum is not None:
            states[order[0]] = self.sum
        if writes:
            y, u = (a[-writes * n :] if self.reverse else a[: writes * n] for a in (y, u))
            new = (states[:writes] if self.reverse else states[starts:]).flatten(0, 1)
            for i in range(0, L, TILE):
                phi = expand(y[:, :, i : i + TILE], self.coefficients, self.dtype, self.of_writers)
                new.baddbmm_(phi, u[:, i : i + TILE].to(self.dtype), beta=float(i > 0))
        for at, following in pairwise(order):
            states[following] += states[at]
        if len(states):
            self.sum = states[order[-1]]
        reads = chunks if starts else chunks - 1
        return (states[-reads:] if self.reverse else states[:reads]).flatten(0, 1) if reads else y[:0]

    def read(self, before: Tensor, x: Tensor) -> Tensor:
        """sum_j sim(x_i, y_j) u_j: x [m, K, L] -> [m, L, W]."""
        out = x.new_empty(len(x), x.shape[2], before.shape[2])
        for i in range(0, x.shape[2], TILE):
            phi = expand(x[:, :, i : i + TILE], self.coefficients, self.dtype, self.of_readers)
            out[:, i : i + TILE] = torch.bmm(phi.transpose(1, 2), before)
        return out

    def read_slope(self, before: Tensor, x: Tensor, w: Tensor) -> Tensor:
        """sum_j (w_i . u_j) d sim(x_i, y_j) / dx_i: x [m, K, L], w [m, W, L] -> [m, K, L]."""
        dx, before = torch.empty_like(x), before.to(w.dtype)
        for i in range(0, x.shape[2], TILE):
            d_phi = torch.bmm(before, w[:, :, i : i + TILE])
            dx[:, :, i : i + TILE] = contract(d_phi, x[:, :, i : i + TILE], self.coefficients, self.of_readers)
        return dx

    def copy_to(self, after: Tensor) -> None:
        """Writes the sum to after [B, H, F, W]."""
        if self.sum is not None:
            order = state_order(self.K, self.coefficients, after.device)
            after.copy_(self.sum.index_select(1, order).unflatten(0, after.shape[:2]))


def _scores(y: Tensor, x: Tensor) -> Tensor:
    """[m, K, J], [m, K, C] -> [m, J, C]."""
    return torch.bmm(y.transpose(1, 2), x)


def _wide(v: Tensor) -> torch.dtype:
    """The dtype of a state that sums are read from.

    The product of features and state cancels, and o is divided by such a sum. fp64 keeps o and dv right if one key is
    thousands of times larger than the others. dq and dk do not need it.
    """
    return torch.float64 if v.device.type != "mps" else accumulate_dtype(v.dtype)


def _empty_state(kernel: AnyKernel, q: Tensor, v: Tensor) -> Tensor:
    """[B, H, F, V+1]."""
    (B, _, H, K), V = q.shape, v.shape[3]
    return v.new_empty(B, H, feature_count(K, kernel.coefficients), V + 1, dtype=accumulate_dtype(v.dtype))


def chunks_first(x: Tensor, L: int) -> Tensor:
    """[B, G L, H, K] -> [G, B, H, L, K], a view."""
    return x.unflatten(1, (-1, L)).permute(1, 0, 3, 2, 4)


def features_first(x: Tensor, L: int, dtype: torch.dtype) -> Tensor:
    """[B, G L, H, K] -> [m, K, L], contiguous."""
    return chunks_first(x, L).transpose(3, 4).to(dtype).contiguous().flatten(0, 2)


def _with_ones(v: Tensor, L: int) -> Tensor:
    """v' = [v, 1]: [B, G L, H, V] -> [m, L, V+1]."""
    return beside(v, 1.0, L)


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


class _Plan(NamedTuple):
    """How a walk is divided."""

    T: int
    chunk: int
    tile: int
    groups: list[tuple[int, int, int]]  # first and last token of each group of chunks, and the length of its chunks
    rows: list[tuple[slice, slice]]  # batch and heads that are walked at once
    threads: int
    device: torch.device

    def run(self, walk: Callable[[slice, slice], None]) -> None:
        """Calls walk(b, h) for all rows."""

        def run(rows: tuple[slice, slice]) -> None:
            with torch.autocast(self.device.type, enabled=False):
                walk(*rows)

        run_on_threads(run, self.rows, self.threads)


def _plan(kernel: AnyKernel, q: Tensor, v: Tensor, *, reads_first: bool, writes_last: bool) -> _Plan:
    (B, T, H, K), W = q.shape, v.shape[-1] + 1
    F = feature_count(K, kernel.coefficients)
    (chunk, tile), cost = _lengths(T, K, W, F, reads_first=reads_first, writes_last=writes_last)
    words = CPU_WORDS if q.device.type == "cpu" else ACCELERATOR_WORDS
    matrices = max(1, words // (tile * (K * K + 2 * F + 3 * chunk + 4 * W)))
    threads = _threads(q.device, B * T * H * cost)
    n = min(matrices, -(-B * H // threads))
    whole = T - T % chunk
    length = chunk * max(1, matrices // n)
    groups = [(i, j, chunk) for i, j in _spans(0, whole, length)] + [(whole, T, T - whole)] * (whole < T)
    return _Plan(T, chunk, tile, groups, _row_groups(B, H, n), threads, q.device)


def _lengths(T: int, K: int, W: int, F: int, *, reads_first: bool, writes_last: bool) -> tuple[tuple[int, int], float]:
    """The lengths (chunk, tile) with the lowest cost, and that cost in multiply-adds per token.

    A pair costs K + W, and the readers of a tile see (chunk + tile) / 2 writers on average. To read the state and to
    write it cost F W each, in all chunks but the first and the last. The sum is monotone in the number of chunks, so
    the best chunk is one tile or all tokens. All tokens are best up to T = 600 at K = 16, and T = 17,000 at K = 128.
    """
    tile = min(TILE, T)

    def cost(chunk: int) -> float:
        n = -(-T // chunk)
        state_uses = (2 * (n - 1) + reads_first + writes_last) / n
        return (K + W + PASSES) * (chunk + tile) / 2 + F * (W + PASSES) * state_uses

    chunk = tile if cost(tile) <= cost(T) else T
    return (chunk, tile), cost(chunk)


def _threads(device: torch.device, work: float) -> int:
    """How many threads share the rows of a walk; 1 where torch itself uses its threads well."""
    if device.type != "cpu" or work < THREADED or not splits_matmuls():
        return 1
    return torch.get_num_threads()


def _row_groups(B: int, H: int, rows: int) -> list[tuple[slice, slice]]:
    """Slices of batch and heads with about `rows` pairs (b, h) each."""
    batch, heads = max(1, rows // H), min(rows, H)
    return [(slice(b, b + batch), slice(h, h + heads)) for b in range(0, B, batch) for h in range(0, H, heads)]


def _spans(start: int, stop: int, length: int, cuts: Iterable[int] = ()) -> list[tuple[int, int]]:
    """(first, last) of each run of at most `length` tokens from start to stop, which also ends at each of `cuts`."""
    inside = [cut for cut in cuts if start < cut < stop]
    return list(pairwise(sorted({*range(start, stop, length), *inside, stop})))


def _cuts(u: Tensor, reverse: bool = False) -> list[int]:
    """Positions at which tiles must end so that no NaN or infinity of u [B, T, H, W] reaches a token it may not reach.

    A product keeps the columns of u apart, and a sum that has met a NaN or an infinity is never finite again. So the
    first that a walk meets in a row and column counts: it must be the first token of its tile, or the last one of a
    reverse walk. The usual answer, none, costs one sum over u. Only a CPU is asked: elsewhere the host would wait.
    """
    if u.device.type != "cpu" or u.sum(dtype=accumulate_dtype(u.dtype)).isfinite():
        return []
    odd = u.isfinite().logical_not_()
    odd = odd.flip(1) if reverse else odd
    first = odd.to(torch.uint8).argmax(1)[odd.any(1)].unique().tolist()
    return [u.shape[1] - at for at in first] if reverse else first
