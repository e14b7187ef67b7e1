"""The recurrence under gated attention and the delta rule, in chunks. Derivation: docs/math.md.

    S' = e^g S,    S = S' + phi(k) x^T,    sums = S^T psi(q)
    x = u, or by the delta rule x = beta (u - S'^T psi(k)): what is new about u

phi are the features of a key and psi those of a query, so psi(a) . phi(b) is the similarity of a and b. Inside a chunk
features are never expanded for pairs of tokens: with a = the sum of g from the start of the chunk, E_ij = e^(a_i - a_j)
and S0 the state before the chunk,

    x = (I + A)^-1 beta (u - e^a psi(k) S0),    A_ij = beta_i sim(k_i, k_j) E_ij for j < i
    sums = e^a psi(q) S0 + P x,                 P_ij = sim(q_i, k_j) E_ij for j <= i

No exponent is positive, however long the sequence. Plain torch, differentiable once.

`_Recurrence` is the scan of chunk_scan.py for autograd. Rows go on threads, as in polynomial attention. Long sequences
keep their inputs alone for the backward pass and scan again.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rebased.ops.derivatives import first_derivatives_only, refuse_transforms
from rebased.ops.polynomial.chunk_plan import row_groups, thread_count
from rebased.ops.polynomial.chunk_scan import (
    CHUNK,
    Chunks,
    Memory,
    ordered_weights,
    prepare,
    query_weights_of,
    scan,
    scan_gradients,
    to_chunks,
    to_tokens,
)
from rebased.ops.polynomial.chunk_scan import Rule as Rule
from rebased.ops.polynomial.features import state_order
from rebased.ops.polynomial.state import key_features
from rebased.ops.threads import run_on_threads

FEATURES = 2**25  # numbers of features that are in memory at once; longer sequences are divided

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
    refuse_transforms("the chunked path of gates and of the delta rule")
    given = [q, k, u, log_decay, None if beta is None else beta.unsqueeze(-1)]
    tokens = max(FEATURES // (B * H * F) // CHUNK, 1) * CHUNK  # per group
    keeps = tokens >= T and torch.is_grad_enabled()
    order, sums = state_order(K, rule.coefficients, q.device), []
    S = torch.empty_like(state, dtype=rule.wide).index_copy(2, order, state.to(rule.wide))
    for start in range(0, T, tokens):
        group: list[Any] = [*(None if x is None else x[:, start : start + tokens] for x in given), S]
        if torch.compiler.is_compiling():  # it neither traces threads nor needs them
            part, S, _ = _recur_rows(*group, rule=rule)
        else:
            part, S = _Recurrence.apply(*group, rule, keeps)
        sums.append(part)
    return torch.cat(sums, dim=1), S.index_select(2, order).to(state.dtype)


def _step(
    q: Tensor, k: Tensor, u: Tensor, g: Tensor | None, beta: Tensor | None, state: Tensor, rule: Rule
) -> tuple[Tensor, Tensor]:
    """`recur` of one token, a step of decoding: the state is read once, by the query and the key together."""
    tokens = torch.stack([q[:, 0], k[:, 0]], dim=2).to(rule.wide)  # [B, H, 2, K]
    phi, weights = key_features(tokens, rule.coefficients), query_weights_of(q, rule)
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
        memory: dict[int, Memory] = {}

        def compute(item: tuple[int, Rows]) -> None:
            number, rows = item
            part, state, found = _recur_rows(*_rows(given, rows), rule=ctx.rule)
            sums[rows[0], :, rows[1]], after[rows] = part, state
            if keeps:
                memory[number] = found

        run_on_threads(compute, list(enumerate(ctx.groups)), torch.get_num_threads(), sums.device)
        ctx.save_for_backward(*given, *(x for number in sorted(memory) for x in memory[number]))
        return sums, after

    @staticmethod
    @first_derivatives_only("the chunked path of gates and of the delta rule")
    def backward(ctx: Any, d_sums: Tensor, d_after: Tensor) -> tuple[Tensor | None, ...]:
        given, memory, size = ctx.saved_tensors[:6], ctx.saved_tensors[6:], len(Memory._fields)
        needed = ctx.needs_input_grad[:6]
        found = [torch.empty_like(x) if need else None for x, need in zip(given, needed, strict=True)]

        def compute(item: tuple[int, Rows]) -> None:
            number, rows = item
            own = Memory(*memory[size * number : size * (number + 1)]) if memory else None
            parts = _gradients(_rows(given, rows), d_sums[rows[0], :, rows[1]], d_after[rows], own, ctx.rule)
            for whole, part in zip(_rows(found, rows), parts, strict=True):
                if whole is not None:
                    whole.copy_(part)

        run_on_threads(compute, list(enumerate(ctx.groups)), torch.get_num_threads(), d_sums.device)
        return *found, None, None


def _rows(tensors: Sequence[Any], rows: Rows) -> list[Any]:
    """Some rows of q, k, u, log_decay, beta [B, T, H, .] and a state [B, H, F, W]."""
    b, h = rows
    *given, state = (None if x is None else x[b] for x in tensors)
    return [None if x is None else x[:, :, h] for x in given] + [None if state is None else state[:, h]]


def _recur_rows(
    q: Tensor, k: Tensor, u: Tensor, g: Tensor | None, beta: Tensor | None, state: Tensor, *, rule: Rule
) -> tuple[Tensor, Tensor, Memory]:
    """`recur` of tokens whose features fit into memory. The features of the state are in the order of features.py."""
    B, T, H, _ = q.shape
    chunks = prepare(q, k, u, g, beta, rule=rule)
    sums, after, memory = scan(chunks, state.flatten(0, 1), ordered_weights(q, rule))
    return to_tokens(sums, B)[:, :T], after.unflatten(0, (B, H)), memory


def _gradients(
    given: list[Any], d_sums: Tensor, d_after: Tensor, memory: Memory | None, rule: Rule
) -> list[Tensor | None]:
    """The gradients of q, k, u, log_decay, beta and the state from those of the results of _recur_rows."""
    leaves: list[Any] = [None if x is None else x.detach().requires_grad_() for x in given[:5]]
    with torch.enable_grad():
        chunks = prepare(*leaves, rule=rule)
    state, weights = given[5].flatten(0, 1), ordered_weights(given[0], rule)
    detached: list[Any] = [None if x is None else x.detach() for x in chunks]
    plain = Chunks(*detached)
    memory = scan(plain, state, weights)[2] if memory is None else memory
    d_sums = to_chunks(d_sums, plain.P.shape[2])
    d_chunks, d_state = scan_gradients(plain, memory, weights, d_sums, d_after.flatten(0, 1))
    pairs = zip(chunks, d_chunks, strict=True)
    wanted = [(x, d) for x, d in pairs if x is not None and d is not None and x.requires_grad]
    outputs, grads = zip(*wanted, strict=True)
    there = [x for x in leaves if x is not None]
    found = iter(torch.autograd.grad(outputs, there, grads))
    return [None if x is None else next(found) for x in leaves] + [d_state.unflatten(0, given[5].shape[:2])]
