"""The chunks of gated attention and the delta rule: what their own tokens give, and the scan over their states.

`prepare` computes what chunks need of their own tokens, and autograd differentiates it. `scan` goes from chunk to
chunk, and `scan_gradients` back. No product has a transposed matrix on its right: without MKL that is ten times slower.
chunked_recurrence.py has the equations.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from rebased.ops.polynomial.features import contract, expand, state_order
from rebased.ops.polynomial.state import Coefficients, query_weights

CHUNK, CHUNK_OF_CHANNELS = 64, 16  # tokens; few if each channel has its decay: E is then [C, C, K]


class Rule(NamedTuple):
    """What a call computes, as numbers."""

    coefficients: Coefficients
    scale: float  # of q . k
    wide: torch.dtype  # of the state and of what is multiplied with it


class Chunks(NamedTuple):
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


class Memory(NamedTuple):
    """What scan has found and scan_gradients needs."""

    x: Tensor  # [N, m, C, W]: the values that are written
    seen: Tensor  # [N, m, C, W]: what queries read from the state before their chunk
    old: Tensor | None  # [N, m, C, W]: what keys read from it
    before: Tensor  # [N, m, F, W]: that state
    solve: Tensor | None  # [N, m, C, C]: (I + A)^-1


def query_weights_of(q: Tensor, rule: Rule) -> Tensor:
    """[F]: the weights of the features of a query."""
    return query_weights(q.shape[3], rule.coefficients, rule.scale, device=q.device, dtype=rule.wide)


def ordered_weights(q: Tensor, rule: Rule) -> Tensor:
    """[F, 1]: `query_weights_of` in the order of features.py."""
    weights = query_weights_of(q, rule).unsqueeze(1)
    return torch.empty_like(weights).index_copy(0, state_order(q.shape[3], rule.coefficients, q.device), weights)


def prepare(q: Tensor, k: Tensor, u: Tensor, g: Tensor | None, beta: Tensor | None, *, rule: Rule) -> Chunks:
    """What chunks need of their own tokens; differentiable."""
    by_channel = g is not None and g.shape[-1] > 1
    C = min(CHUNK_OF_CHANNELS if by_channel else CHUNK, q.shape[1])
    q, k, u = (to_chunks(x, C) for x in (q, k, u))  # [N, m, C, .]
    read, write = _features(q, rule), _features(k, rule)
    known, decay = write, None
    since = until = kept = u.new_ones(1, 1, 1, 1)
    if g is not None:
        a = to_chunks(g, C).cumsum(2)  # [N, m, C, 1 or K]
        later = torch.ones(C, C, dtype=torch.bool, device=q.device).triu(1)  # the second token comes after the first
        decay = (a.unsqueeze(3) - a.unsqueeze(2)).masked_fill(later.unsqueeze(-1), -torch.inf).exp()
        since, until, kept = a.exp(), (a[:, :, -1:] - a).exp(), a[:, :, -1:].exp().transpose(2, 3)
    if by_channel:  # the decays are factors of features; else of values and sums, which are fewer numbers
        read, known, write = (x * y.transpose(2, 3) for x, y in ((read, since), (known, since), (write, until)))
        since = until = u.new_ones(1, 1, 1, 1)
    since, until = (x.expand(*u.shape[:3], 1) for x in (since, until))
    kept = kept.to(rule.wide).expand(*u.shape[:2], -1, 1)
    A = None
    if beta is not None:
        beta = to_chunks(beta, C)
        A = (beta * _similarity(k, k, decay, rule)).tril(-1)
    return Chunks(u, beta, A, _similarity(q, k, decay, rule), read, known, write, since, until, kept)


def scan(chunks: Chunks, S: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Memory]:
    """(sums [N, m, C, W], state after [m, F, W], memory) of the state before [m, F, W]."""
    u, beta, A, P, read, known, write, since, until, kept = chunks
    solve, xs, seen, olds, before = None, [], [], [], []
    if A is not None:
        eye = torch.eye(A.shape[3], device=S.device, dtype=A.dtype)
        solve = torch.linalg.solve_triangular(eye + A, eye.expand_as(A), upper=False, unitriangular=True)
    for n in range(len(u)):
        before.append(S)
        weighted, x = weights * S, u[n]
        seen.append(torch.bmm(read[n].mT, weighted).to(u.dtype))
        if solve is not None and beta is not None:
            olds.append(torch.bmm(known[n].mT, weighted).to(u.dtype))
            x = torch.bmm(solve[n], beta[n] * (x - since[n] * olds[-1]))
        S = torch.baddbmm(kept[n] * S, write[n], (until[n] * x).to(S.dtype))
        xs.append(x)
    found = Memory(torch.stack(xs), torch.stack(seen), torch.stack(olds) if olds else None, torch.stack(before), solve)
    return P @ found.x + since * found.seen, S, found


def scan_gradients(
    chunks: Chunks, memory: Memory, weights: Tensor, d_sums: Tensor, dS: Tensor
) -> tuple[Chunks, Tensor]:
    """The gradients of chunks and of the state before, from those of the sums and of the state after."""
    u, beta, _, P, read, known, write, since, until, kept = chunks
    x, seen, old, before, solve = memory
    dx, d_seen = P.mT @ d_sums, since * d_sums
    dys, d_afters, d_writtens = [], [], []
    for n in reversed(range(len(x))):
        d_afters.append(dS)
        d_writtens.append(torch.bmm(write[n].mT, dS).to(x.dtype))
        dx[n].addcmul_(until[n], d_writtens[-1])
        d_read = torch.bmm(read[n], d_seen[n].to(dS.dtype))
        if solve is not None and beta is not None:
            dys.append(torch.bmm(solve[n].mT, dx[n]))
            d_read.baddbmm_(known[n], (since[n] * beta[n] * dys[-1]).to(dS.dtype), alpha=-1)
        dS = torch.addcmul(weights * d_read, kept[n], dS)
    d_after, d_written = torch.stack(d_afters[::-1]), torch.stack(d_writtens[::-1])
    weighted, xt = weights * before, x.mT.contiguous()
    du, d_beta, d_A = dx, None, None
    d_known: Any = None  # without a beta nothing reads what is known
    d_since = (d_sums * seen).sum(-1, keepdim=True)
    if beta is not None and old is not None:
        dy = torch.stack(dys[::-1])
        du, d_beta, d_A = beta * dy, (dy * (u - since * old)).sum(-1, keepdim=True), -(dy @ xt)
        d_known = weighted @ (-since * du).mT.to(weighted.dtype).contiguous()
        d_since = d_since - (du * old).sum(-1, keepdim=True)
    d_until = (d_written * x).sum(-1, keepdim=True)
    d_kept = (before * d_after).sum(-1, keepdim=True)
    return Chunks(
        du, d_beta, d_A, d_sums @ xt,
        weighted @ d_seen.mT.to(weighted.dtype).contiguous(), d_known,
        d_after @ (xt * until.mT).to(weighted.dtype),
        d_since, d_until, d_kept if kept.shape[2] > 1 else d_kept.sum(2, keepdim=True),
    ), dS  # fmt: skip


def _features(x: Tensor, rule: Rule) -> Tensor:
    """The features of x [N, m, C, K]: [N, m, F, C]."""
    if rule.coefficients[0] == rule.coefficients[2] == 0:  # x itself
        return x.transpose(2, 3).to(rule.wide)
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


def to_chunks(x: Tensor, C: int) -> Tensor:
    """[B, T, H, W] -> [N, B H, C, W]. Tokens that fill the last chunk are zeros: they write nothing."""
    x = functional.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % C))
    return x.unflatten(1, (-1, C)).permute(1, 0, 3, 2, 4).flatten(1, 2)


def to_tokens(x: Tensor, B: int) -> Tensor:
    """The inverse of `to_chunks`, with the tokens that fill the last chunk: [N, B H, C, W] -> [B, N C, H, W]."""
    return x.unflatten(1, (B, -1)).permute(1, 0, 3, 2, 4).flatten(1, 2)


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
