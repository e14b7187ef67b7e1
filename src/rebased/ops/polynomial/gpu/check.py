"""Whether the kernels of polynomial attention are right: some of their numbers, computed again in fp64.

A pass is checked for some heads of some sequences: outputs and dq of some queries, dk and dv of some keys, some
features of states. All are sums over pairs of a query and a key, quadratic in neither.

A tolerance is the roundoff of the products times the sum of the absolute terms. Where a term is a product of x . y, or
of features whose sum is a power of it, its size is |x . y| + sqrt(sum of x^2 y^2), because that is what the rounding
errors of x, y or the features add up to, though x . y may be zero (`_reach`).
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rebased.ops.comparison import FP32, MARGIN, Errors, pick, relative_to, some
from rebased.ops.polynomial.gpu.call import choose_products
from rebased.ops.polynomial.gpu.forward import EARLY
from rebased.ops.polynomial.gpu.layout import canonical, monomials, public_gradient
from rebased.ops.polynomial.state import Coefficients, PolyState, key_features, query_features

HEADS = 4  # of all sequences together
ROWS = 72  # queries, and keys, of a head: all rows of a tile of 64, and the ends
PAIRS = 2**22  # of a query and a key, per head: fewer rows of long sequences
FEATURES = 48  # of a state
ROUNDOFF = {"bf16": 2.0**-9, "tf32": 2.0**-10, "tf32x3": 2.0**-19}
"""Of a factor of a product, or of what is rounded to become one. TF32 drops bits; three products in TF32 make one in
fp32, with the roundings of its sums."""
ROUNDINGS = 4.0
"""One after the other, at most: features, their sums, gradients at scores, the result."""

CANCELLED = 2.0**-6
"""Of the roundoff: what is left of pairs of tokens that cancel in the gradient of a gate. They are the same numbers in
fp32, summed in two orders."""


class Sequence(NamedTuple):
    """One head of one sequence, in fp64."""

    number: int  # of the sequence
    row: int  # of the batch
    head: int
    tokens: slice

    def of(self, x: Tensor) -> Tensor:
        """[L, W] of x [B, T, H, W]."""
        return x[self.row, self.tokens, self.head].double()

    def scalars(self, x: Tensor) -> Tensor:
        """[L] of x [B, H, T]."""
        return x[self.row, self.head, self.tokens].double()

    def sums(self, log_decay: Tensor | None) -> Tensor | None:
        """[L]: the sums of log_decay [B, T, H] up to each token; None without a gate."""
        return None if log_decay is None else log_decay[self.row, self.tokens, self.head].double().cumsum(0)

    def state(self, state: PolyState) -> PolyState:
        """kv [1, 1, F, V] and z [1, 1, F] of the states of all sequences and heads."""
        at = (slice(self.number, self.number + 1), slice(self.head, self.head + 1))
        return PolyState(state.kv[at].double(), state.z[at].double())


def _sequences(B: int, T: int, H: int, cu_seqlens: Tensor | None) -> Iterator[Sequence]:
    """Some heads of some sequences that have tokens."""
    bounds = None if cu_seqlens is None else cu_seqlens.tolist()
    numbers = list(range(B)) if bounds is None else [n for n in range(len(bounds) - 1) if bounds[n] < bounds[n + 1]]
    for index in some(len(numbers) * H, HEADS):
        n = numbers[index // H]
        tokens, row = (slice(0, T), n) if bounds is None else (slice(bounds[n], bounds[n + 1]), 0)
        yield Sequence(n, row, index % H, tokens)


def _rows(count: int, length: int) -> list[int]:
    return some(count, max(8, min(ROWS, PAIRS // max(1, length))), every=64)


def _reach(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """x . y of all pairs, and how large its terms are: [n, W] and [m, W] -> [n, m] each."""
    dot = x @ y.T
    return dot, dot.abs() + ((x * x) @ (y * y).T).sqrt()


class _Scores(NamedTuple):
    """Similarities of some queries with some keys, zero where the key comes later; and how large their terms are."""

    sim: Tensor
    sim_size: Tensor
    slope: Tensor  # derivative of sim by q . k
    slope_size: Tensor


def _scores(q: Tensor, q_at: Tensor, k: Tensor, k_at: Tensor, c: Coefficients, gate: Tensor | None = None) -> _Scores:
    """gate [L]: the sums of the log decays up to each token, or None."""
    c0, c1, c2 = c
    s, size = _reach(q, k)
    seen = q_at[:, None] >= k_at[None, :]
    made = (
        c0 + s * (c1 + c2 * s), abs(c0) + size * (abs(c1) + abs(c2) * size),
        c1 + 2 * c2 * s, abs(c1) + 2 * abs(c2) * size,
    )  # fmt: skip
    decay = 1.0 if gate is None else (gate[q_at][:, None] - gate[k_at][None, :]).clamp(max=0).exp()
    return _Scores(*(torch.where(seen, x * decay, 0) for x in made))


def _feature_gradient(x: Tensor, y: Tensor, weights: Tensor | None, c: Coefficients) -> Tensor:
    """The gradient at x [n, K] of the sum of features of x times y [n, F]; weights [F] of the features, or None."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        features = key_features(x, c)
        total = (features * (y if weights is None else y * weights)).sum()
        return torch.autograd.grad(total, x)[0]


class _Found:
    """The largest error of each result over its tolerance."""

    def __init__(self, roundoff: float) -> None:
        self.errors: Errors = {}
        self.unit = ROUNDINGS * roundoff

    def add(self, name: str, got: Tensor, want: Tensor, size: Tensor) -> None:
        error = relative_to(got, want, self.unit * size)
        self.errors[name] = max(error, self.errors.get(name, 0.0))


def _check_outputs(
    found: _Found, got: Tensor, q: Tensor, q_at: Tensor, k: Tensor, v: Tensor, c: Coefficients, eps: float,
    before: PolyState | None = None, gate: Tensor | None = None,
) -> None:  # fmt: skip
    """o [n, V] of queries [n, K] at positions [n], with keys and values [L, .] at 0 .. L-1, after a state."""
    at = torch.arange(len(k), device=k.device)
    scores = _scores(q, q_at, k, at, c, gate)
    num, num_size = scores.sim @ v, scores.sim_size @ v.abs()
    den, den_size = scores.sim.sum(1), scores.sim_size.sum(1)
    if before is not None:
        phi = query_features(q, c, 1.0) * _since_start(gate, q_at)
        num, num_size = num + phi @ before.kv[0, 0], num_size + phi.abs() @ before.kv[0, 0].abs()
        den, den_size = den + phi @ before.z[0, 0], den_size + phi.abs() @ before.z[0, 0].abs()
    _check_quotient(found, got, num, num_size, (den + eps)[:, None], den_size[:, None])


def _since_start(gate: Tensor | None, at: Tensor) -> Any:
    """The decays [n, 1] from before the first token to tokens at positions [n]; 1 without a gate."""
    return 1.0 if gate is None else gate[at].exp()[:, None]


def _until_end(gate: Tensor | None, at: Tensor) -> Any:
    """The decays [n, 1] from tokens to after the last one; 1 without a gate."""
    return 1.0 if gate is None else (gate[-1] - gate[at]).exp()[:, None]


def _check_quotient(found: _Found, got: Tensor, num: Tensor, num_size: Tensor, den: Tensor, den_size: Tensor) -> None:
    """num / den, where the denominator has a digit left."""
    want = num / den
    size = (num_size + want.abs() * den_size) / den.abs()
    sound = (found.unit * den_size < 0.5 * den.abs()).expand_as(want)
    found.add("o", torch.where(sound, got.double(), want).to(got.dtype), want, size)


def _check_state(
    found: _Found, name: str, got: PolyState, start: PolyState | None, x: Tensor, y: Tensor, weight: Tensor,
    weight_size: Tensor, c: Coefficients, scale: Tensor | None = None, decay: Any = 1.0, kept: Any = 1.0,
) -> None:  # fmt: skip
    """Some features of kv [1, 1, F, V] and z [1, 1, F]: start plus the sums of phi(x) times y [L, V] and weight [L].

    scale [L] multiplies phi(x), which then has the weights of queries. decay [L, 1] multiplies it too, and `kept` the
    start."""
    chosen = torch.tensor(some(got.z.shape[2], FEATURES), device=x.device)
    first, second, weights = (each[chosen] for each in monomials(x.shape[1], c, 1.0, x.device))
    with_one = torch.cat([x, torch.ones_like(x[:, :1])], dim=1)
    phi = with_one[:, first] * with_one[:, second] * decay
    if scale is not None:
        phi = phi * weights.double() * scale[:, None]
    kv, z = (0, 0) if start is None else (kept * start.kv[0, 0, chosen], kept * start.z[0, 0, chosen])
    kv_size, z_size = (0, 0) if start is None else (kv.abs(), z.abs())  # type: ignore[union-attr]
    found.add(f"{name} kv", got.kv[0, 0, chosen].float(), kv + phi.T @ y, kv_size + phi.T.abs() @ y.abs())
    found.add(f"{name} z", got.z[0, 0, chosen].float(), z + phi.T @ weight, z_size + phi.T.abs() @ weight_size)


def compare_forward(args: tuple[Any, ...], result: Any) -> Errors:
    """Errors of launch.forward."""
    given, *_ = args
    c, q, k, v = (given.c0, given.c1, given.c2), given.q, given.k, given.v
    found = _Found(ROUNDOFF[choose_products(q)])
    (B, T, H, K), V = q.shape, v.shape[3]
    for one in _sequences(B, T, H, given.cu_seqlens):
        keys, values = one.of(k), one.of(v)
        gate = one.sums(given.log_decay)
        rows = torch.tensor(_rows(len(keys), len(keys)), device=q.device)
        before = None
        if given.kv_initial is not None:
            before = canonical(one.state(PolyState(given.kv_initial, given.z_initial)), V, K, c)
        got = result.o[one.row, one.tokens, one.head][rows]
        _check_outputs(found, got, one.of(q)[rows], rows, keys, values, c, given.eps, before, gate)
        if result.kv_final is not None:
            after = canonical(one.state(PolyState(result.kv_final, result.z_final)), V, K, c)
            ones = torch.ones_like(keys[:, 0])
            everywhere = torch.arange(len(keys), device=q.device)
            kept = 1.0 if gate is None else gate[-1].exp()
            decays = _until_end(gate, everywhere)
            _check_state(found, "state", after, before, keys, values, ones, ones, c, None, decays, kept)
    return found.errors


class _Gradients(NamedTuple):
    """What the gradients of one head are made of, per query."""

    q: Tensor  # [n, K]
    at: Tensor  # [n]
    do: Tensor  # [n, V]
    delta: Tensor  # [n]: -(do . o)
    delta_size: Tensor
    inverse: Tensor  # [n]: 1 / sum of similarities


def _queries(q: Tensor, at: Tensor, do: Tensor, o: Tensor, inverse: Tensor) -> _Gradients:
    delta = -(do * o).sum(1)
    return _Gradients(q, at, do, delta, delta.abs() + ((do * o) ** 2).sum(1).sqrt(), inverse)


def _check_query_gradients(
    found: _Found,
    got: Tensor,
    some_queries: _Gradients,
    k: Tensor,
    v: Tensor,
    c: Coefficients,
    before: PolyState | None,
    gate: Tensor | None = None,
) -> None:
    """dq [n, K]."""
    of = some_queries
    scores = _scores(of.q, of.at, k, torch.arange(len(k), device=k.device), c, gate)
    slope, slope_size = _reach(of.do, v)
    slope, slope_size = slope + of.delta[:, None], slope_size + of.delta_size[:, None]
    want, size = (slope * scores.slope) @ k, (slope_size * scores.slope_size) @ k.abs()
    if before is not None:
        weights = query_features(torch.ones_like(of.q[:1]), c, 1.0)[0]
        kv, z, decay = before.kv[0, 0], before.z[0, 0], _since_start(gate, of.at)
        want = want + _feature_gradient(of.q, decay * (of.do @ kv.T + of.delta[:, None] * z), weights, c)
        sizes = decay * (of.do.abs() @ kv.abs().T + of.delta_size[:, None] * z.abs())
        size = size + _feature_gradient(of.q.abs(), sizes, weights.abs(), c)
    found.add("dq", got, want * of.inverse[:, None], size * of.inverse.abs()[:, None])


def _check_key_gradients(
    found: _Found, got_k: Tensor, got_v: Tensor, k: Tensor, k_at: Tensor, v: Tensor, queries: _Gradients,
    c: Coefficients, after: PolyState | None, gate: Tensor | None = None,
) -> None:  # fmt: skip
    """dk [m, K] and dv [m, V] of some keys."""
    scores = _scores(queries.q, queries.at, k, k_at, c, gate)
    slope, slope_size = _reach(queries.do, v)
    slope, slope_size = slope + queries.delta[:, None], slope_size + queries.delta_size[:, None]
    scale, scale_size = queries.inverse[:, None], queries.inverse.abs()[:, None]
    dk = (scale * slope * scores.slope).T @ queries.q
    dk_size = (scale_size * slope_size * scores.slope_size).T @ queries.q.abs()
    dv, dv_size = (scale * scores.sim).T @ queries.do, (scale_size * scores.sim_size).T @ queries.do.abs()
    if after is not None:
        kv, z, decay = after.kv[0, 0], after.z[0, 0], _until_end(gate, k_at)
        phi = key_features(k, c) * decay
        dk = dk + _feature_gradient(k, decay * (v @ kv.T + z), None, c)
        dk_size = dk_size + _feature_gradient(k.abs(), decay * (v.abs() @ kv.abs().T + z.abs()), None, c)
        dv, dv_size = dv + phi @ kv, dv_size + phi.abs() @ kv.abs()
    found.add("dk", got_k, dk, dk_size)
    found.add("dv", got_v, dv, dv_size)


def _check_decay_gradients(
    found: _Found, got: Tensor, k: Tensor, v: Tensor, queries: _Gradients, c: Coefficients,
    before: PolyState | None, after: PolyState | None, gate: Tensor,
) -> None:  # fmt: skip
    """dg [L] of the last tokens, as many as PAIRS allows: the sum over i >= t > j of the gradient at a decayed
    similarity times it. The state before counts as the first key, that after the last token as the last query."""
    L = len(k)
    n = max(1, min(L, PAIRS // L))
    everywhere = torch.arange(L, device=k.device)
    of = _Gradients(*(x[L - n :] for x in queries))
    scores = _scores(of.q, of.at, k, everywhere, c, gate)
    slope, slope_size = _reach(of.do, v)
    inverse = of.inverse[:, None]
    pairs = inverse * (slope + of.delta[:, None]) * scores.sim
    sizes = inverse.abs() * (slope_size + of.delta_size[:, None]) * scores.sim_size
    first, first_size = torch.zeros_like(pairs[:, :1]), torch.zeros_like(pairs[:, :1])
    last, last_size = torch.zeros_like(gate)[None, :], torch.zeros_like(gate)[None, :]
    corner = corner_size = gate.new_zeros(1, 1)
    if before is not None:
        kv, z, phi = before.kv[0, 0], before.z[0, 0], inverse * query_features(of.q, c, 1.0) * _since_start(gate, of.at)
        first = (phi * (of.do @ kv.T + of.delta[:, None] * z)).sum(1, keepdim=True)
        first_size = (phi.abs() * (of.do.abs() @ kv.abs().T + of.delta_size[:, None] * z.abs())).sum(1, keepdim=True)
    if after is not None:
        kv, z, phi = after.kv[0, 0], after.z[0, 0], key_features(k, c) * _until_end(gate, everywhere)
        last = (phi * (v @ kv.T + z)).sum(1)[None, :]
        last_size = (phi.abs() * (v.abs() @ kv.abs().T + z.abs())).sum(1)[None, :]
        if before is not None:
            products = torch.cat([(x * y).flatten() for x, y in zip(before, after, strict=True)]) * gate[-1].exp()
            corner, corner_size = products.sum().reshape(1, 1), products.abs().sum().reshape(1, 1)

    def between(first: Tensor, pairs: Tensor, corner: Tensor, last: Tensor) -> Tensor:
        """[n]: over the queries from t on and the keys before t."""
        whole = torch.cat([torch.cat([first, pairs], 1), torch.cat([corner, last], 1)])  # [n + 1, L + 1]
        return whole.cumsum(1)[:, L - n : L].tril().sum(0)

    size = between(first_size, sizes, corner_size, last_size)
    size += CANCELLED * sizes.sum(1).flip(0).cumsum(0).flip(0)
    found.add("dg", got[L - n :], between(first, pairs, corner, last), size)


def _wide_outputs(given: Any, one: Sequence) -> Tensor:
    """o [L, V] of one head, with the rounding errors of its first rows."""
    o, lo = one.of(given.o), given.o_lo
    if lo is None or lo.numel() == 0:
        return o
    if lo.shape == given.o.shape:  # as o; only the first rows of a sequence are written
        return o + torch.where(torch.arange(len(o), device=o.device)[:, None] < EARLY.value, one.of(lo), 0)
    rows = min(EARLY.value, len(o))
    o[:rows] += lo[one.number, one.head, :rows].double()
    return o


def compare_backward(args: tuple[Any, ...], result: Any) -> Errors:
    """Errors of launch.backward: it is checked with the outputs and the sums of similarities that it was given."""
    (given,) = args
    c, q, k, v = (given.c0, given.c1, given.c2), given.q, given.k, given.v
    found = _Found(ROUNDOFF[choose_products(q)])
    (B, T, H, K), V = q.shape, v.shape[3]
    for one in _sequences(B, T, H, given.cu_seqlens):
        keys, values, inverse = one.of(k), one.of(v), one.scalars(given.inverse)
        everywhere = torch.arange(len(keys), device=q.device)
        queries = _queries(one.of(q), everywhere, one.of(given.do), _wide_outputs(given, one), inverse)
        rows = torch.tensor(_rows(len(keys), len(keys)), device=q.device)
        before = after = None
        if given.kv_initial is not None:
            before = canonical(one.state(PolyState(given.kv_initial, given.z_initial)), V, K, c)
        if given.d_kv is not None or given.d_z is not None:
            d_kv = given.d_kv if given.d_kv is not None else given.d_z.new_zeros(*given.d_z.shape, V)
            d_z = given.d_z if given.d_z is not None else given.d_kv.new_zeros(given.d_kv.shape[:3])
            after = public_gradient(one.state(PolyState(d_kv, d_z)), V, K, c)
        got, gate = [x[one.row, one.tokens, one.head][rows] for x in result[:3]], one.sums(given.log_decay)
        _check_query_gradients(found, got[0], _Gradients(*(x[rows] for x in queries)), keys, values, c, before, gate)
        _check_key_gradients(found, got[1], got[2], keys[rows], rows, values[rows], queries, c, after, gate)
        if gate is not None:
            dg = result.log_decay[one.row, one.tokens, one.head]
            _check_decay_gradients(found, dg, keys, values, queries, c, before, after, gate)
        if before is not None:
            start = public_gradient(one.state(PolyState(result.kv_initial, result.z_initial)), V, K, c)
            sums = (queries.q, queries.do, queries.delta, queries.delta_size)
            kept = 1.0 if gate is None else gate[-1].exp()
            _check_state(found, "d state", start, after, *sums, c, inverse, _since_start(gate, everywhere), kept)
    return found.errors


def compare_at(args: tuple[Any, ...], result: Any) -> Errors:
    """Errors of selected.poly_at."""
    q, k, v, at, *c, eps = args
    o, _, _ = result
    found = _Found(ROUNDOFF[choose_products(q)])
    B, n, H, _ = q.shape
    for one in _sequences(B, k.shape[1], H, None):
        keys, values = one.of(k), one.of(v)
        rows = torch.tensor(_rows(n, len(keys)), device=q.device)
        queries, places = q[one.row, rows, one.head].double(), at[one.row, rows]
        _check_outputs(found, o[one.row, rows, one.head], queries, places, keys, values, tuple(c), eps)
    return found.errors


def compare_at_backward(args: tuple[Any, ...], result: Any) -> Errors:
    """Errors of selected.poly_at_backward."""
    do, q, k, v, at, o, o_lo, inverse, *numbers = args
    c: Coefficients = tuple(numbers)
    dq, dk, dv = result
    found = _Found(ROUNDOFF[choose_products(q)])
    B, n, H, _ = q.shape
    wide = o.double() + o_lo.double() if o_lo.numel() else o.double()
    for one in _sequences(B, k.shape[1], H, None):
        keys, values, row, head = one.of(k), one.of(v), one.row, one.head
        queries = _queries(
            q[row, :, head].double(),
            at[row],
            do[row, :, head].double(),
            wide[row, :, head],
            inverse[row, head].double(),
        )
        rows = torch.tensor(_rows(n, len(keys)), device=q.device)
        _check_query_gradients(
            found, dq[row, rows, head], _Gradients(*(x[rows] for x in queries)), keys, values, c, None
        )
        rows = torch.tensor(_rows(len(keys), n), device=q.device)
        _check_key_gradients(
            found, dk[row, rows, head], dv[row, rows, head], keys[rows], rows, values[rows], queries, c, None
        )
    return found.errors


def step_errors(
    q: Tensor, k: Tensor, v: Tensor, before: PolyState, o: Tensor, after: PolyState, c: Coefficients, eps: float,
    *, normalised: bool = False, log_decay: Tensor | None = None,
) -> Errors:  # fmt: skip
    """Errors of one token of decoding, computed in fp32: q and k [S, H, K] in fp64, v and o [S, H, V]; states kv
    [S, H, F, V] and z [S, H, F]; log_decay [S, H] or None. normalised: q and k come from a norm, where a small number
    may be a difference of large ones."""
    found = _Found(FP32 / ROUNDINGS * MARGIN)
    v, before = v.double(), PolyState(before.kv.double(), before.z.double())
    if log_decay is not None:
        kept = log_decay.double().exp().unsqueeze(-1)
        before = PolyState(before.kv * kept.unsqueeze(-1), before.z * kept)
    q_size, k_size = (x.abs() + normalised * x.abs().amax(-1, keepdim=True) for x in (q, k))
    phi_q, phi_k = query_features(q, c, 1.0), key_features(k, c)
    phi_q_size, phi_k_size = query_features(q_size, c, 1.0).abs(), key_features(k_size, c)
    kv, z = before.kv + phi_k.unsqueeze(-1) * v.unsqueeze(-2), before.z + phi_k
    kv_size, z_size = before.kv.abs() + phi_k_size.unsqueeze(-1) * v.abs().unsqueeze(-2), before.z.abs() + phi_k_size
    found.add("kv", after.kv, kv, kv_size)
    found.add("z", after.z, z, z_size)
    num, num_size = (torch.einsum("shf,shfv->shv", x, y) for x, y in ((phi_q, kv), (phi_q_size, kv_size)))
    den, den_size = ((x * y).sum(-1, keepdim=True) for x, y in ((phi_q, z), (phi_q_size, z_size)))
    _check_quotient(found, o, num, num_size, den + eps, den_size)
    return found.errors


def compare_decode(args: tuple[Any, ...], result: Any) -> Errors:
    """Errors of launch.decode."""
    q, k, v, kv, z, c0, c1, c2, scale, eps, *gate = args
    o, *after = result
    return _compare_step(q, k, v, PolyState(kv, z), o, PolyState(*after), (c0, c1, c2), scale, eps, *gate)


def compare_decode_(args: tuple[Any, ...], o: Tensor, after: list[Tensor]) -> Errors:
    """Errors of launch.decode_."""
    q, k, v, before, c, scale, eps, *gate = args
    return _compare_step(q, k, v, before, o, PolyState(*after), c, scale, eps, *gate)


def _compare_step(
    q: Tensor, k: Tensor, v: Tensor, before: PolyState, o: Tensor, after: PolyState, c: Coefficients, scale: float,
    eps: float, log_decay: Tensor | None = None,
) -> Errors:  # fmt: skip
    """step_errors of some sequences, as many as have a million numbers of state."""
    numbers = some(len(q), max(2, 2**20 // (before.kv.numel() // len(q))))
    c0, c1, c2 = c
    q, k, v, o = (pick(x, 0, numbers).squeeze(1) for x in (q, k, v, o))
    before, after = (PolyState(*(pick(x, 0, numbers) for x in state)) for state in (before, after))
    gate = None if log_decay is None else pick(log_decay, 0, numbers).squeeze(1)
    c = (c0, c1 * scale, c2 * scale**2)
    return step_errors(q.double(), k.double(), v, before, o, after, c, eps, log_decay=gate)
