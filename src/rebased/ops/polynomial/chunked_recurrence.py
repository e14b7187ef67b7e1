"""The recurrence under gated attention and the delta rule, in chunks. Derivation: docs/math.md.

    S' = e^g S,    S = S' + phi(k) x^T,    sums = S^T psi(q)
    x = u, or by the delta rule x = beta (u - S'^T psi(k)): what is new about u

phi are the features of a key and psi those of a query, so psi(a) . phi(b) is the similarity of a and b. Inside a chunk
features are never expanded for pairs of tokens: with a = the sum of g from the start of the chunk, E_ij = e^(a_i - a_j)
and S0 the state before the chunk,

    x = (I + A)^-1 beta (u - e^a psi(k) S0),    A_ij = beta_i sim(k_i, k_j) E_ij for j < i
    sums = e^a psi(q) S0 + P x,                 P_ij = sim(q_i, k_j) E_ij for j <= i

No exponent is positive, however long the sequence. Plain torch, differentiable once.

`_prepare` computes what chunks need of their own tokens; autograd differentiates it. `_scan` goes from chunk to chunk,
and `_scan_gradients` back; long sequences keep their inputs alone for it and scan again. Rows go on threads as in
polynomial attention. No product has a transposed matrix on its right: without MKL that is ten times slower.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from rebased.ops.polynomial.chunk_plan import row_groups, thread_count
from rebased.ops.polynomial.features import contract, expand, state_order
from rebased.ops.polynomial.state import Coefficients, key_features, query_weights
from rebased.ops.threads import run_on_threads

CHUNK, CHUNK_OF_CHANNELS = 64, 16  # tokens; few if each channel has its decay: E is then [C, C, K]
FEATURES = 2**25  # numbers of features that are in memory at once; longer sequences are divided


class Rule(NamedTuple):
    """What a call computes, as numbers."""

    coefficients: Coefficients
    scale: float  # of q . k
    wide: torch.dtype  # of the state and of what is multiplied with it


class _Chunks(NamedTuple):
    """What the chunks of a sequence need of their own tokens: N chunks, m = B H rows, C tokens."""

    u: Tensor  # [N, m, C, W]
    beta: Tensor | None  # [N, m, C, 1]
    A: Tensor | None  # [N, m, C, C]
    P: Tensor  # [N, m, C, C]
    read: Tensor  # [N, m, F, C]: phi of the queries
    known: Tensor  # [N, m, F, C]: phi of the keys as they read the state
    write: Tensor  # [N, m, F, C]: phi of the keys as they are written to it
    since: Tensor  # [N, m, C, 1]: decay from the state before the chunk to a token
    until: Tensor  # [N, m, C, 1]: decay from a token to the end of the chunk
    kept: Tensor  # [N, m, 1 or K, 1]: decay over the chunk


class _Memory(NamedTuple):
    """What _scan has found and _scan_gradients needs."""

    x: Tensor  # [N, m, C, W]: the values that are written
    seen: Tensor  # [N, m, C, W]: what queries read from the state before their chunk
    old: Tensor | None  # [N, m, C, W]: what keys read from it
    before: Tensor  # [N, m, F, W]: that state
    solve: Tensor | None  # [N, m, C, C]: (I + A)^-1


Rows = tuple[slice, slice]
"""Some batch rows and heads."""


def recur(
    q: Tensor, k: Tensor, u: Tensor, log_decay: Tensor | None, beta: Tensor | None, state: Tensor, rule: Rule
) -> tuple[Tensor, Tensor]:
    """(sums [B, T, H, W], state after) of q, k [B, T, H, K], u [B, T, H, W] and the state before [B, H, F, W].

    log_decay is [B, T, H], or [B, T, H, K] if each channel has its own (degree 1 only), or None: nothing fades.
    beta is [B, T, H], or None: u is added as it is.
    """
    (B, T, H, K), F = q.shape, state.shape[2]
    if log_decay is not None and log_decay.ndim == 3:
        log_decay = log_decay.unsqueeze(-1)
    if T == 1:
        return _step(q, k, u, log_decay, beta, state, rule)
    given = [q, k, u, log_decay, None if beta is None else beta.unsqueeze(-1)]
    tokens = max(FEATURES // (B * H * F) // CHUNK, 1) * CHUNK  # per group
    keeps = tokens >= T and torch.is_grad_enabled()
    order, sums = state_order(K, rule.coefficients, q.device), []
    S = torch.empty_like(state, dtype=rule.wide).index_copy(2, order, state.to(rule.wide))
    for start in range(0, T, tokens):
        group: list[Any] = [None if x is None else x[:, start : start + tokens] for x in given]
        if torch.compiler.is_compiling():  # it neither traces threads nor needs them
            part, S, _ = _recur_rows(*group, S, rule)
        else:
            part, S = _Recurrence.apply(*group, S, rule, keeps)
        sums.append(part)
    return torch.cat(sums, dim=1), S.index_select(2, order).to(state.dtype)


def _step(
    q: Tensor, k: Tensor, u: Tensor, g: Tensor | None, beta: Tensor | None, state: Tensor, rule: Rule
) -> tuple[Tensor, Tensor]:
    """`recur` of one token, a step of decoding: the state is read once, by the query and the key together."""
    tokens = torch.stack([q[:, 0], k[:, 0]], dim=2).to(rule.wide)  # [B, H, 2, K]
    phi, weights = key_features(tokens, rule.coefficients), _query_weights(q, rule)
    S, x = state.to(rule.wide), u[:, 0].to(rule.wide)
    S = S if g is None else S * g[:, 0].to(rule.wide).exp().unsqueeze(-1)
    read, known = ((weights * phi) @ S).unbind(2)  # [B, H, W] each: what the query and the key read before the token
    x = x if beta is None else beta[:, 0].to(rule.wide).unsqueeze(-1) * (x - known)
    seen = (weights * phi[:, :, 0] * phi[:, :, 1]).sum(-1, keepdim=True)  # the similarity of the query and the key
    after = torch.addcmul(S, phi[:, :, 1].unsqueeze(-1), x.unsqueeze(-2))
    return torch.addcmul(read, seen, x).to(u.dtype).unsqueeze(1), after.to(state.dtype)


class _Recurrence(torch.autograd.Function):
    """`_recur_rows` of all rows, on threads."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        *given, ctx.rule, keeps = inputs
        (B, T, H, _), (F, W) = given[0].shape, given[5].shape[2:]
        ctx.groups = row_groups(B, H, -(-B * H // thread_count(given[0].device, B * T * H * F * W)))
        sums, after = torch.empty_like(given[2]), torch.empty_like(given[5])
        memory: dict[int, _Memory] = {}

        def compute(number: int, rows: Rows) -> None:
            part, state, found = _recur_rows(*_rows(given, rows), ctx.rule)
            sums[rows[0], :, rows[1]], after[rows] = part, state
            if keeps:
                memory[number] = found

        _on_threads(compute, ctx.groups, sums.device)
        ctx.save_for_backward(*given, *(x for number in sorted(memory) for x in memory[number]))
        return sums, after

    @staticmethod
    def backward(ctx: Any, *d_outputs: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[:6]
        return *_RecurrenceGradients.apply(*d_outputs, ctx.rule, ctx.groups, needed, *ctx.saved_tensors), None, None


class _RecurrenceGradients(torch.autograd.Function):
    """The backward pass as a function of all that it depends on: a second derivative is an error and never zero."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor | None, ...]:
        d_sums, d_after, rule, groups, needed, *saved = inputs
        given, memory = saved[:6], saved[6:]
        found = [torch.empty_like(x) if need else None for x, need in zip(given, needed, strict=True)]

        def compute(number: int, rows: Rows) -> None:
            size = len(_Memory._fields)
            own = _Memory(*memory[size * number : size * (number + 1)]) if memory else None
            d_outputs = d_sums[rows[0], :, rows[1]], d_after[rows]
            parts = _gradients(_rows(given, rows), *d_outputs, own, rule)
            for whole, part in zip(_rows(found, rows), parts, strict=True):
                if whole is not None:
                    whole.copy_(part)

        _on_threads(compute, groups, d_sums.device)
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:
        raise RuntimeError('the chunked path has first derivatives only; for second ones pass backend="reference"')


def _on_threads(compute: Callable[[int, Rows], None], groups: list[Rows], device: torch.device) -> None:
    """Calls compute(number, rows) for all groups of rows, each on its thread."""

    def plainly(item: tuple[int, Rows]) -> None:
        with torch.autocast(device.type, enabled=False):
            compute(*item)

    run_on_threads(plainly, list(enumerate(groups)), torch.get_num_threads())


def _rows(tensors: Sequence[Any], rows: Rows) -> list[Any]:
    """Some rows of q, k, u, log_decay, beta [B, T, H, .] and a state [B, H, F, W]."""
    b, h = rows
    *given, state = (None if x is None else x[b] for x in tensors)
    return [None if x is None else x[:, :, h] for x in given] + [None if state is None else state[:, h]]


def _recur_rows(
    q: Tensor, k: Tensor, u: Tensor, g: Tensor | None, beta: Tensor | None, state: Tensor, rule: Rule
) -> tuple[Tensor, Tensor, _Memory]:
    """`recur` of tokens whose features fit into memory. The features of the state are in the order of features.py."""
    B, T, H, _ = q.shape
    chunks = _prepare(q, k, u, g, beta, rule)
    sums, after, memory = _scan(chunks, state.flatten(0, 1), _weights(q, rule))
    return _tokens(sums, B)[:, :T], after.unflatten(0, (B, H)), memory


def _gradients(
    given: list[Any], d_sums: Tensor, d_after: Tensor, memory: _Memory | None, rule: Rule
) -> list[Tensor | None]:
    """The gradients of q, k, u, log_decay, beta and the state from those of the results of _recur_rows."""
    leaves = [None if x is None else x.detach().requires_grad_() for x in given[:5]]
    with torch.enable_grad():
        chunks = _prepare(*leaves, rule)
    state, weights = given[5].flatten(0, 1), _weights(given[0], rule)
    plain = _Chunks(*(None if x is None else x.detach() for x in chunks))
    memory = _scan(plain, state, weights)[2] if memory is None else memory
    d_sums = _chunks(d_sums, plain.P.shape[2])
    d_chunks, d_state = _scan_gradients(plain, memory, weights, d_sums, d_after.flatten(0, 1))
    pairs = zip(chunks, d_chunks, strict=True)
    wanted = [(x, d) for x, d in pairs if x is not None and d is not None and x.requires_grad]
    outputs, grads = zip(*wanted, strict=True)
    there = [x for x in leaves if x is not None]
    found = iter(torch.autograd.grad(outputs, there, grads))
    return [None if x is None else next(found) for x in leaves] + [d_state.unflatten(0, given[5].shape[:2])]


def _query_weights(q: Tensor, rule: Rule) -> Tensor:
    """[F]: the weights of the features of a query."""
    return query_weights(q.shape[3], rule.coefficients, rule.scale, device=q.device, dtype=rule.wide)


def _weights(q: Tensor, rule: Rule) -> Tensor:
    """[F, 1]: `_query_weights` in the order of features.py."""
    weights = _query_weights(q, rule).unsqueeze(1)
    return torch.empty_like(weights).index_copy(0, state_order(q.shape[3], rule.coefficients, q.device), weights)


def _prepare(q: Tensor, k: Tensor, u: Tensor, g: Tensor | None, beta: Tensor | None, rule: Rule) -> _Chunks:
    """What chunks need of their own tokens; differentiable."""
    by_channel = g is not None and g.shape[-1] > 1
    C = min(CHUNK_OF_CHANNELS if by_channel else CHUNK, q.shape[1])
    q, k, u = (_chunks(x, C) for x in (q, k, u))  # [N, m, C, .]
    read, write = _features(q, rule), _features(k, rule)
    known, decay = write, None
    since = until = kept = u.new_ones(1, 1, 1, 1)
    if g is not None:
        a = _chunks(g, C).cumsum(2)  # [N, m, C, 1 or K]
        decay = (a.unsqueeze(3) - a.unsqueeze(2)).masked_fill(_later(C, q.device).unsqueeze(-1), -torch.inf).exp()
        since, until, kept = a.exp(), (a[:, :, -1:] - a).exp(), a[:, :, -1:].exp().transpose(2, 3)
    if by_channel:  # the decays are factors of features; else of values and sums, which are fewer numbers
        read, known, write = (x * y.transpose(2, 3) for x, y in ((read, since), (known, since), (write, until)))
        since = until = u.new_ones(1, 1, 1, 1)
    since, until = (x.expand(*u.shape[:3], 1) for x in (since, until))
    kept = kept.to(rule.wide).expand(*u.shape[:2], -1, 1)
    A = None
    if beta is not None:
        beta = _chunks(beta, C)
        A = (beta * _similarity(k, k, decay, rule)).tril(-1)
    return _Chunks(u, beta, A, _similarity(q, k, decay, rule), read, known, write, since, until, kept)


def _scan(chunks: _Chunks, S: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, _Memory]:
    """(sums [N, m, C, W], state after [m, F, W], memory) of the state before [m, F, W]."""
    u, beta, A, P, read, known, write, since, until, kept = chunks
    solve, xs, seen, olds, before = None, [], [], [], []
    if A is not None:
        eye = torch.eye(A.shape[3], device=S.device, dtype=A.dtype)
        solve = torch.linalg.solve_triangular(eye + A, eye.expand_as(A), upper=False, unitriangular=True)
    for n in range(len(u)):
        before.append(S)
        weighted, x = weights * S, u[n]
        seen.append(torch.bmm(_transposed(read[n]), weighted).to(u.dtype))
        if solve is not None and beta is not None:
            olds.append(torch.bmm(_transposed(known[n]), weighted).to(u.dtype))
            x = torch.bmm(solve[n], beta[n] * (x - since[n] * olds[-1]))
        S = torch.baddbmm(kept[n] * S, write[n], (until[n] * x).to(S.dtype))
        xs.append(x)
    found = _Memory(torch.stack(xs), torch.stack(seen), torch.stack(olds) if olds else None, torch.stack(before), solve)
    return P @ found.x + since * found.seen, S, found


def _scan_gradients(
    chunks: _Chunks, memory: _Memory, weights: Tensor, d_sums: Tensor, dS: Tensor
) -> tuple[_Chunks, Tensor]:
    """The gradients of chunks and of the state before, from those of the sums and of the state after."""
    u, beta, _, P, read, known, write, since, until, kept = chunks
    x, seen, old, before, solve = memory
    dx, d_seen = _transposed(P) @ d_sums, since * d_sums
    dys, d_afters, d_writtens = [], [], []
    for n in reversed(range(len(x))):
        d_afters.append(dS)
        d_writtens.append(torch.bmm(_transposed(write[n]), dS).to(x.dtype))
        dx[n].addcmul_(until[n], d_writtens[-1])
        d_read = torch.bmm(read[n], d_seen[n].to(dS.dtype))
        if solve is not None and beta is not None:
            dys.append(torch.bmm(_transposed(solve[n]), dx[n]))
            d_read.baddbmm_(known[n], (since[n] * beta[n] * dys[-1]).to(dS.dtype), alpha=-1)
        dS = torch.addcmul(weights * d_read, kept[n], dS)
    d_after, d_written = torch.stack(d_afters[::-1]), torch.stack(d_writtens[::-1])
    weighted, xt = weights * before, _transposed(x).contiguous()
    du, d_beta, d_A, d_known = dx, None, None, None
    d_since = (d_sums * seen).sum(-1, keepdim=True)
    if beta is not None and old is not None:
        dy = torch.stack(dys[::-1])
        du, d_beta, d_A = beta * dy, (dy * (u - since * old)).sum(-1, keepdim=True), -(dy @ xt)
        d_known = weighted @ _transposed(-since * du).to(weighted.dtype).contiguous()
        d_since = d_since - (du * old).sum(-1, keepdim=True)
    d_until = (d_written * x).sum(-1, keepdim=True)
    d_kept = (before * d_after).sum(-1, keepdim=True)
    return _Chunks(
        du, d_beta, d_A, d_sums @ xt,
        weighted @ _transposed(d_seen).to(weighted.dtype).contiguous(), d_known,
        d_after @ (xt * _transposed(until)).to(weighted.dtype),
        d_since, d_until, d_kept if kept.shape[2] > 1 else d_kept.sum(2, keepdim=True),
    ), dS  # fmt: skip


def _transposed(x: Tensor) -> Tensor:
    return x.transpose(-1, -2)


def _features(x: Tensor, rule: Rule) -> Tensor:
    """The features of x [N, m, C, K]: [N, m, F, C]."""
    flat = x.flatten(0, 1).transpose(1, 2).to(rule.wide)
    found: Tensor = _Features.apply(flat, rule.coefficients)
    return found.unflatten(0, x.shape[:2])


class _Features(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, coefficients: Coefficients) -> Tensor:
        ctx.save_for_backward(x)
        ctx.coefficients = coefficients
        return expand(x, coefficients, x.dtype)

    @staticmethod
    def backward(ctx: Any, d_phi: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return contract(d_phi, x, ctx.coefficients), None


def _chunks(x: Tensor, C: int) -> Tensor:
    """[B, T, H, W] -> [N, B H, C, W]. Tokens that fill the last chunk are zeros: they write nothing."""
    x = functional.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % C))
    return x.unflatten(1, (-1, C)).permute(1, 0, 3, 2, 4).flatten(1, 2)


def _tokens(x: Tensor, B: int) -> Tensor:
    """The inverse of `_chunks`, with the tokens that fill the last chunk: [N, B H, C, W] -> [B, N C, H, W]."""
    return x.unflatten(1, (B, -1)).permute(1, 0, 3, 2, 4).flatten(1, 2)


def _later(C: int, device: torch.device) -> Tensor:
    """[C, C]: True where the second token comes after the first."""
    return torch.ones(C, C, dtype=torch.bool, device=device).triu(1)


def _similarity(x: Tensor, y: Tensor, decay: Tensor | None, rule: Rule) -> Tensor:
    """sim(x_i, y_j) E_ij for j <= i, else zero: x, y [N, m, C, K] -> [N, m, C, C]."""
    c0, c1, c2 = rule.coefficients
    if decay is not None and decay.shape[-1] > 1:
        return c1 * rule.scale * torch.einsum("nmik,nmjk,nmijk->nmij", x, y, decay)
    s: Tensor = _Product.apply(_times(rule.scale, x).flatten(0, 1), y.flatten(0, 1))
    sim = _times(c1, s) if c2 == 0 else _times(c2, s.square()) if c1 == 0 else s * (c1 + c2 * s)
    sim = (sim if c0 == 0 else c0 + sim).unflatten(0, x.shape[:2])
    return sim.tril() if decay is None else sim * decay.squeeze(-1)


def _times(factor: float, x: Tensor) -> Tensor:
    """factor * x, without a pass over x if the factor is 1."""
    return x if factor == 1 else factor * x


class _Product(torch.autograd.Function):
    """x y^T of x, y [m, C, K]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return torch.bmm(x, y.transpose(1, 2).contiguous())

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        return torch.bmm(d, y.contiguous()), torch.bmm(d.transpose(1, 2), x.contiguous())
