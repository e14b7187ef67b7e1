"""The recurrence under gated attention and the delta rule, in chunks. Derivation: docs/math.md.

    S' = e^g S,    S = S' + phi(k) x^T,    sums = S^T psi(q)
    x = u, or by the delta rule x = beta (u - S'^T psi(k)): what is new about u

phi are the features of a key and psi those of a query, so psi(a) . phi(b) is the similarity of a and b. Inside a chunk
features are never expanded for pairs of tokens: with a = the sum of g from the start of the chunk, E_ij = e^(a_i - a_j)
and S0 the state before the chunk,

    x = (I + A)^-1 beta (u - e^a psi(k) S0),    A_ij = beta_i sim(k_i, k_j) E_ij for j < i
    sums = e^a psi(q) S0 + P x,                 P_ij = sim(q_i, k_j) E_ij for j <= i

No exponent is positive, however long the sequence. Plain torch; autograd differentiates it, once.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from rebased.ops.polynomial.features import contract, expand, state_order
from rebased.ops.polynomial.state import Coefficients, query_weights

CHUNK, CHUNK_OF_CHANNELS = 64, 16  # tokens; few if each channel has its decay: E is then [C, C, K]
FEATURES = 2**25  # numbers that are in memory at once; longer sequences are computed again in the backward pass


class Rule(NamedTuple):
    """What a call computes, as numbers."""

    coefficients: Coefficients
    scale: float  # of q . k
    wide: torch.dtype  # of the state and of what is multiplied with it


def recur(
    q: Tensor, k: Tensor, u: Tensor, log_decay: Tensor | None, beta: Tensor | None, state: Tensor, rule: Rule
) -> tuple[Tensor, Tensor]:
    """(sums [B, T, H, W], state after) of q, k [B, T, H, K], u [B, T, H, W] and the state before [B, H, F, W].

    log_decay is [B, T, H], or [B, T, H, K] if each channel has its own (degree 1 only), or None: nothing fades.
    beta is [B, T, H], or None: u is added as it is.
    """
    (B, T, H, _), F = q.shape, state.shape[2]
    if log_decay is None:
        log_decay = q.new_zeros(q.shape[:3])
    if log_decay.ndim == 3:
        log_decay = log_decay.unsqueeze(-1)
    given = [q, k, u, log_decay, None if beta is None else beta.unsqueeze(-1)]
    tokens = max(FEATURES // (B * H * F) // CHUNK, 1) * CHUNK  # per group
    sums, dtype = [], state.dtype
    state = state.to(rule.wide)
    for start in range(0, T, tokens):
        group: list[Any] = [None if x is None else x[:, start : start + tokens] for x in given]
        group += [state, rule]
        if tokens < T and torch.is_grad_enabled():
            part, state = checkpoint(_recur_group, *group, use_reentrant=False)
        else:
            part, state = _recur_group(*group)
        sums.append(part)
    return torch.cat(sums, dim=1), state.to(dtype)


def _recur_group(
    q: Tensor, k: Tensor, u: Tensor, g: Tensor, beta: Tensor | None, state: Tensor, rule: Rule
) -> tuple[Tensor, Tensor]:
    """`recur` of tokens whose features fit into memory."""
    B, T, H, K = q.shape
    by_channel = g.shape[-1] > 1
    C = min(CHUNK_OF_CHANNELS if by_channel else CHUNK, T)
    q, k, u, g = (_chunks(x, C) for x in (q, k, u, g))  # [N, m, C, .], m = B H
    a = g.cumsum(2)
    since, until, kept = (x.exp() for x in (a, a[:, :, -1:] - a, a[:, :, -1:]))
    decay = (a.unsqueeze(3) - a.unsqueeze(2)).masked_fill(_later(C, q.device).unsqueeze(-1), -torch.inf).exp()
    P = _similarity(q, k, decay, rule)
    read, known = _features(q, rule).transpose(2, 3), _features(k, rule)  # [N, m, C, F], [N, m, F, C]
    write, known = known, known.transpose(2, 3)
    if by_channel:  # the decays are factors of features; else of values and sums, which are fewer numbers
        read, known, write = read * since, known * since, write * until.transpose(2, 3)
        since = until = since.new_ones(1)
    kept = kept.transpose(2, 3).to(rule.wide)  # [N, m, 1 or K, 1]
    order = state_order(K, rule.coefficients, q.device)
    weights = query_weights(K, rule.coefficients, rule.scale, device=q.device, dtype=rule.wide).unsqueeze(1)  # [F, 1]
    weights = torch.empty_like(weights).index_copy_(0, order, weights)
    S = state.flatten(0, 1)[:, torch.argsort(order)]
    before = []
    if beta is None:
        for more, part in zip((write @ (until * u).to(rule.wide)).unbind(), kept.unbind(), strict=True):
            before.append(S)
            S = torch.addcmul(more, part, S)
        x = u
    else:
        beta = _chunks(beta, C)
        A = (beta * _similarity(k, k, decay, rule)).tril(-1)
        eye = torch.eye(C, device=q.device, dtype=A.dtype)
        solve = torch.linalg.solve_triangular(eye + A, eye.expand_as(A), upper=False, unitriangular=True)
        solve = solve * beta.transpose(2, 3)
        fade = (torch.broadcast_to(each, (*u.shape[:3], 1)) for each in (since, until))
        chunks = zip(*(each.unbind() for each in (u, solve, known, write, kept, *fade)), strict=True)
        news = []
        for u_n, solve_n, known_n, write_n, kept_n, since_n, until_n in chunks:
            before.append(S)
            old = (known_n @ (weights * S)).to(u.dtype)
            news.append(solve_n @ (u_n - since_n * old))
            S = torch.baddbmm(kept_n * S, write_n, (until_n * news[-1]).to(rule.wide))
        x = torch.stack(news)
    sums = P @ x + since * (read @ (weights * torch.stack(before))).to(u.dtype)
    found = sums.unflatten(1, (B, H)).permute(1, 0, 3, 2, 4).flatten(1, 2)  # [B, N C, H, W]
    return found[:, :T], S[:, order].unflatten(0, (B, H))


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


def _later(C: int, device: torch.device) -> Tensor:
    """[C, C]: True where the second token comes after the first."""
    return torch.ones(C, C, dtype=torch.bool, device=device).triu(1)


def _similarity(x: Tensor, y: Tensor, decay: Tensor, rule: Rule) -> Tensor:
    """sim(x_i, y_j) E_ij for j <= i, else zero: [N, m, C, C]."""
    c0, c1, c2 = rule.coefficients
    if decay.shape[-1] > 1:
        return c1 * rule.scale * torch.einsum("nmik,nmjk,nmijk->nmij", x, y, decay)
    s = rule.scale * (x @ y.transpose(2, 3))
    return (c0 + s * (c1 + c2 * s)) * decay.squeeze(-1)
