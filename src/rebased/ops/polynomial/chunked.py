"""Polynomial attention in linear time, in plain torch: the path of CPUs. Derivation: docs/math.md.

Every sum of this operator, forward or backward, has one pattern, a *walk*: tokens called readers (x, w) look at tokens
called writers (y, u) on one side of them,

    out_i = sum_j sim(x_i, y_j) u_j        dx_i = sum_j (w_i . u_j) d sim(x_i, y_j) / dx_i

With v' = [v, 1] the forward walk gives numerator and denominator at once, o = num / (den + eps). With
g' = [do, -(do . o)] / (den + eps) the gradients are two more walks:

    forward     readers q        writers (k, v')   over j <= i    out -> o
    for dq      readers (q, g')  writers (k, v')   over j <= i    dx  -> dq
    for dk, dv  readers (k, v')  writers (q, g')   over j >= i    dx  -> dk, out -> dv

A walk divides time into *chunks*. Readers see the writers of earlier chunks through the state sum_j phi(y_j) u_j^T, and
those of their own chunk pair by pair, one *tile* of readers after another. Chunks of one tile are the classic chunked
form; one chunk for all tokens is tiled quadratic attention. The backward computes states again by walking again, so
nothing of the size of a state is stored per chunk.

Masked pairs are zeros in a product, and zero times NaN is NaN. So on a CPU tiles also end where a sum first meets a NaN
or an infinity (`_cuts`): no reader of a tile then stands on the wrong side of it.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rebased.ops.backend import accumulate_dtype, splits_matmuls
from rebased.ops.polynomial.features import contract, expand
from rebased.ops.polynomial.state import EVERY_DEGREE, Coefficients, PolyState, feature_count, query_weights
from rebased.ops.threads import run_on_threads

TILE = 128  # readers per tile: below it small matmuls lose half their speed, above it masked pairs are wasted work
PASSES = 32  # multiply-adds a matmul does in the time of the element-wise passes over one pair or one feature
CPU_WORDS = 2**22  # numbers that a walk works on at once, so that they stay in a cache; an accelerator needs more
ACCELERATOR_WORDS = 2**28
THREADED = 2**24  # multiply-adds from which a walk runs on several threads: about a millisecond


class Kernel(NamedTuple):
    """The similarity c0 + c1 s + c2 s^2 with s = scale * (x . y), as a function of s."""

    coefficients: Coefficients
    scale: float

    def similarity(self, s: Tensor) -> Tensor:
        """c0 + c1 s + c2 s^2, in a new tensor."""
        c0, c1, c2 = self.coefficients
        sim = s.square() if c1 == 0 else (c2 * s).add_(c1).mul_(s)
        sim = sim.mul_(c2) if c1 == 0 and c2 != 1 else sim
        return sim.add_(c0) if c0 != 0 else sim

    def times_slope_(self, ds: Tensor, s: Tensor) -> Tensor:
        """ds * (c1 + 2 c2 s), written over ds and s."""
        _, c1, c2 = self.coefficients
        return ds.mul_(s.mul_(2 * c2).add_(c1)) if c1 != 0 else ds.mul_(s).mul_(2 * c2)

    def query_weights(self, K: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        """[F]: the weight of each feature on the query side."""
        return query_weights(K, self.coefficients, self.scale, device=device, dtype=dtype)


class LearnedKernel(NamedTuple):
    """The same with coefficients in a tensor [3]. The host never reads them."""

    values: Tensor
    scale: float

    @property
    def coefficients(self) -> Coefficients:
        """Which degrees have features: all."""
        return EVERY_DEGREE

    def similarity(self, s: Tensor) -> Tensor:
        """c0 + c1 s + c2 s^2, in a new tensor."""
        c0, c1, c2 = self.values.to(s.dtype)
        return (c2 * s).add_(c1).mul_(s).add_(c0)

    def times_slope_(self, ds: Tensor, s: Tensor) -> Tensor:
        """ds * (c1 + 2 c2 s), written over ds and s."""
        _, c1, c2 = self.values.to(s.dtype)
        return ds.mul_(s.mul_(2 * c2).add_(c1))

    def query_weights(self, K: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        """[F]: the weight of each feature on the query side."""
        return query_weights(K, self.values, self.scale, device=device, dtype=dtype)


AnyKernel = Kernel | LearnedKernel


def attend(q: Tensor, k: Tensor, v: Tensor, *, coefficients: Coefficients, scale: float, eps: float) -> Tensor:
    """o [B, T, H, V] of q, k [B, T, H, K] and v [B, T, H, V]. Differentiable once."""
    if torch.compiler.is_compiling():
        from rebased.ops.polynomial import chunked_operators  # here: registering operators is not for every import

        return chunked_operators.attend(q, k, v, None, coefficients, scale, eps)[0]
    return _Attention.apply(q, k, v, None, Kernel(coefficients, scale), eps)[0]


def extend(
    q: Tensor, k: Tensor, v: Tensor, state: PolyState, *, coefficients: Coefficients, scale: float, eps: float
) -> tuple[Tensor, PolyState]:
    """attend for tokens that follow a state, and the state after them. Differentiable once."""
    before = torch.cat([state.kv, state.z.unsqueeze(-1)], dim=-1)  # [B, H, F, V+1]
    if torch.compiler.is_compiling():
        from rebased.ops.polynomial import chunked_operators

        o, after = chunked_operators.attend(q, k, v, before, coefficients, scale, eps)
    else:
        o, after, _, _ = _Attention.apply(q, k, v, before, Kernel(coefficients, scale), eps)
    return o, PolyState(kv=after[..., :-1].contiguous(), z=after[..., -1].contiguous())


def forward(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor | None, kernel: AnyKernel, eps: float
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """(o, state after or None) of (q, k, v, state or None); a state here is kv and z side by side [B, H, F, V+1].

    Two more outputs are only for the backward: o before it was rounded to half precision (else None), and the
    denominator [B, T, H, 1].
    """
    sums, _, after = _walk(kernel, q, k, _with_ones(v), None, state, want_out=True, want_state=state is not None)
    assert sums is not None
    denominator = sums[..., -1:] + eps
    o = sums[..., :-1] / denominator
    if o.dtype == v.dtype:
        return o, after, None, denominator
    return o.to(v.dtype), after, o, denominator


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor | None,
    o: Tensor,
    denominator: Tensor,
    do: Tensor | None,
    d_after: Tensor | None,
    kernel: AnyKernel,
    needed: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """The gradients of q, k, v and the state, of those that are needed, from the gradients of o and the state after."""
    need_q, need_k, need_v, need_state = needed
    v1 = _with_ones(v)
    g1 = output_gradient(o, denominator, do)
    dq = dk = dv = d_state = None
    if need_q:
        dq = _walk(kernel, q, k, v1, g1, state)[1]
    if need_k or need_v or need_state:
        w = v1 if need_k else None
        dv, dk, d_state = _walk(kernel, k, q, g1, w, d_after, reverse=True, want_out=need_v, want_state=need_state)
    return (
        dq.to(q.dtype) if dq is not None else None,
        dk.to(k.dtype) if dk is not None else None,
        dv[..., :-1].to(v.dtype) if dv is not None else None,
        d_state,
    )


def output_gradient(o: Tensor, denominator: Tensor, do: Tensor | None) -> Tensor:
    """g' = [do, -(do . o)] / denominator: the gradient of numerator and denominator, [B, T, H, V+1]."""
    do = torch.zeros_like(o) if do is None else do.to(o.dtype)
    return torch.cat([do, -(do * o).sum(-1, keepdim=True)], dim=-1).div_(denominator)


def coefficient_gradient(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor | None, o: Tensor, denominator: Tensor, do: Tensor, scale: float
) -> Tensor:
    """The gradient of (c0, c1, c2), [3] in fp64: of c_d it is sum_i g'_i . sum_j s_ij^d v'_j.

    The inner sums are a forward walk with the similarity s^d, whose features are those of degree d alone.
    """
    K = q.shape[3]
    g1, v1 = output_gradient(o, denominator, do).double(), _with_ones(v)
    bounds = (0, 1, 1 + K, feature_count(K, EVERY_DEGREE))
    found = []
    for degree in range(3):
        one = Kernel((float(degree == 0), float(degree == 1), float(degree == 2)), scale)
        part = None if state is None else state[:, :, bounds[degree] : bounds[degree + 1]]
        sums, _, _ = _walk(one, q, k, v1, None, part, want_out=True)
        assert sums is not None
        found.append((g1 * sums).sum())
    return torch.stack(found)


NO_DOUBLE_BACKWARD = (
    "the chunked path of polynomial attention has first derivatives only; "
    'for second derivatives pass backend="reference"'
)


class _Attention(torch.autograd.Function):
    """`forward` for autograd."""

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
        return forward(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        q, k, v, state, ctx.kernel, _ = inputs
        o, _, o_wide, denominator = output
        ctx.save_for_backward(q, k, v, state, o if o_wide is None else o_wide, denominator)
        ctx.mark_non_differentiable(*(x for x in (o_wide, denominator) if x is not None))
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, d_after: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        return *_Gradients.apply(*ctx.saved_tensors, do, d_after, ctx.kernel, ctx.needs_input_grad[:4]), None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[Any, Any]:
        return _fold_vmap(_Attention, info.batch_size, in_dims, inputs, tensors=4)


class _Gradients(torch.autograd.Function):
    """`backward` as a function of all that it depends on: a second derivative is then an error and never zero."""

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor | None, ...]:
        return backward(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:
        raise RuntimeError(NO_DOUBLE_BACKWARD)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[Any, Any]:
        return _fold_vmap(_Gradients, info.batch_size, in_dims, inputs, tensors=8)


def _fold_vmap(
    function: Any, size: int, in_dims: tuple[Any, ...], inputs: tuple[Any, ...], tensors: int
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """torch.func.vmap over a function whose first `tensors` inputs have the batch axis first: the axis is folded into
    the batch and unfolded from the outputs."""

    def fold(x: Tensor | None, dim: int | None) -> Tensor | None:
        if x is None:
            return None
        batched = x.movedim(dim, 0) if dim is not None else x.expand(size, *x.shape)
        return batched.flatten(0, 1)

    folded = [fold(x, dim) for x, dim in zip(inputs[:tensors], in_dims, strict=False)]
    outputs = function.apply(*folded, *inputs[tensors:])
    unfolded = tuple(None if x is None else x.unflatten(0, (size, -1)) for x in outputs)
    return unfolded, tuple(None if x is None else 0 for x in outputs)


def _with_ones(v: Tensor) -> Tensor:
    """v' = [v, 1]: [B, T, H, V] -> [B, T, H, V+1], in the dtype of the sums."""
    v = v.to(accumulate_dtype(v.dtype))
    return torch.cat([v, torch.ones_like(v[..., :1])], dim=-1)


class _Walk(NamedTuple):
    """The tensors of a walk; None for those that are not given or not wanted."""

    x: Tensor  # [B, T, H, K] of the readers
    y: Tensor  # [B, T, H, K] of the writers
    u: Tensor  # [B, T, H, W] of the writers
    w: Tensor | None  # [B, T, H, W] of the readers
    state: Tensor | None  # [B, H, F, W]: what the readers have seen before the first step
    out: Tensor | None  # [B, T, H, W], to be filled
    dx: Tensor | None  # [B, T, H, K], to be filled
    after: Tensor | None  # [B, H, F, W]: the state after the last step, to be filled

    def rows(self, b: slice, h: slice) -> "_Walk":
        """The walk of some batch rows and heads: views."""
        x, y, u, w, state, out, dx, after = self
        w, out, dx = (None if a is None else a[b, :, h] for a in (w, out, dx))
        state, after = (None if a is None else a[b, h] for a in (state, after))
        return _Walk(x[b, :, h], y[b, :, h], u[b, :, h], w, state, out, dx, after)


def _walk(
    kernel: AnyKernel,
    x: Tensor,
    y: Tensor,
    u: Tensor,
    w: Tensor | None,
    state: Tensor | None,
    *,
    reverse: bool = False,
    want_out: bool = False,
    want_state: bool = False,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(out [B, T, H, W], dx [B, T, H, K], state after), each None if not wanted.

    The tensors are those of _Walk; dx is made if w is given. A reverse walk goes from the last token to the first.
    Queries are the readers, or the writers of a reverse walk.
    """
    (B, T, H, K), W = x.shape, u.shape[-1]
    F = feature_count(K, kernel.coefficients)
    (chunk, tile), cost = _lengths(T, K, W, F, reads_first=state is not None, writes_last=want_state)
    out = torch.empty_like(u) if want_out else None
    dx = torch.empty_like(x, dtype=u.dtype) if w is not None else None
    after = u.new_empty(B, H, F, W) if want_state else None

    walk = _Walk(x, y, u, w, state, out, dx, after)
    summed = [u] * want_out + [y] * (w is not None)  # the writers' tensors that masked pairs are multiplied with
    cuts = sorted({cut for tensor in summed for cut in _cuts(tensor, reverse)})

    def walk_rows(rows: tuple[slice, slice]) -> None:
        with torch.autocast(x.device.type, enabled=False):
            _walk_rows(kernel, walk.rows(*rows), chunk, tile, cuts, reverse)

    limit = CPU_WORDS if x.device.type == "cpu" else ACCELERATOR_WORDS
    rows = max(1, limit // (tile * (K * K + 2 * F + 3 * chunk + 4 * W)))
    threads = _threads(x.device, B * T * H * cost)
    run_on_threads(walk_rows, _row_groups(B, H, min(rows, -(-B * H // threads))), threads)
    return out, dx, after


def _walk_rows(kernel: AnyKernel, walk: _Walk, chunk: int, tile: int, cuts: list[int], reverse: bool) -> None:
    """Fills out, dx and after of a walk of n pairs (b, h), where they are given. Tiles also end at `cuts`.

    Inside, tokens are the last axis of x, y and w, so that features are rows and no matmul needs a transposed copy.
    """
    x, y, u, w, state, out, dx, after = walk
    (B, T, H, K), dtype = x.shape, u.dtype
    rows = (B, H)
    # The product of features and state cancels, and o is divided by such a sum. fp64 keeps o and dv right if one key is
    # thousands of times larger than the others. dq and dk do not need it.
    wide = torch.float64 if out is not None and x.device.type != "mps" else dtype
    weights = kernel.query_weights(K, x.device, wide).unsqueeze(-1)
    S = None if state is None else state.to(wide).flatten(0, 1)  # [n,F,W]
    mask = torch.Tensor.tril_ if reverse else torch.Tensor.triu_  # of [writers, readers]
    chunks = _spans(0, T, chunk, reverse)
    for number, (first, last) in enumerate(chunks):
        ys = _features_first(y[:, first:last], dtype)  # [n,K,L]
        us = _tokens_first(u[:, first:last])  # [n,L,W]
        for i, j in _spans(first, last, tile, reverse, cuts):
            seen = slice(i - first, None) if reverse else slice(0, j - first)  # the writers that this tile sees
            own = slice(0, j - i) if reverse else slice(i - first, j - first)  # of these, the tokens of this tile
            xs = _features_first(x[:, i:j], dtype)  # [n,K,C]
            s = torch.bmm(ys[:, :, seen].transpose(1, 2), kernel.scale * xs)  # [n,J,C]
            if out is not None:
                sim = kernel.similarity(s)
                mask(sim[:, own])
                o = torch.bmm(sim.transpose(1, 2), us[:, seen])  # [n,C,W]
                if S is not None:
                    phi = expand(xs.to(wide), kernel.coefficients)
                    phi = phi if reverse else phi.mul_(weights)
                    o += torch.bmm(phi.transpose(1, 2), S)
                out[:, i:j] = o.unflatten(0, rows).transpose(1, 2)
            if dx is not None and w is not None:
                ws = _features_first(w[:, i:j], dtype)  # [n,W,C]
                ds = kernel.times_slope_(torch.bmm(us[:, seen], ws), s)  # [n,J,C]
                mask(ds[:, own])
                d = torch.bmm(ys[:, :, seen], ds).mul_(kernel.scale)  # [n,K,C]
                if S is not None:
                    d_phi = torch.bmm(S.to(dtype), ws)
                    d += contract(d_phi if reverse else d_phi.mul_(weights), xs, kernel.coefficients)
                dx[:, i:j] = d.unflatten(0, rows).permute(0, 3, 1, 2)
        if number < len(chunks) - 1 or after is not None:
            for i, j in _spans(0, last - first, tile, reverse):
                phi = expand(ys[:, :, i:j].to(wide), kernel.coefficients)
                phi = phi.mul_(weights) if reverse else phi
                update = torch.bmm(phi, us[:, i:j].to(wide))
                S = update if S is None else update.add_(S)
    if after is not None and S is not None:
        after.copy_(S.unflatten(0, rows))


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


def _spans(start: int, stop: int, length: int, reverse: bool, cuts: Sequence[int] = ()) -> list[tuple[int, int]]:
    """(first, last) of each run of at most `length` tokens from start to stop, which also ends at each of `cuts`."""
    inside = [cut for cut in cuts if start < cut < stop]
    spans = list(pairwise(sorted({*range(start, stop, length), *inside, stop})))
    return spans[::-1] if reverse else spans


def _cuts(u: Tensor, reverse: bool) -> list[int]:
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


def _features_first(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, T, H, K] -> [B*H, K, T], contiguous."""
    return x.permute(0, 2, 3, 1).to(dtype).contiguous().flatten(0, 1)


def _tokens_first(x: Tensor) -> Tensor:
    """[B, T, H, K] -> [B*H, T, K], contiguous."""
    return x.transpose(1, 2).contiguous().flatten(0, 1)
