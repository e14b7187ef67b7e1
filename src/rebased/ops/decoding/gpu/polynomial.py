# mypy: allow-untyped-defs
"""Polynomial attention of a decoding step on a GPU: the norms of q and k, their features, the state, the output.

One program per sequence and head. It reads and writes each number of its state once.
"""

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from rebased.ops.comparison import pick, some
from rebased.ops.decoding import reference
from rebased.ops.decoding.gpu.linear import row_statistics, scaled
from rebased.ops.kernel_launch import launch
from rebased.ops.polynomial.gpu.check import step_errors
from rebased.ops.polynomial.gpu.layout import monomials
from rebased.ops.polynomial.state import Coefficients, PolyState
from rebased.ops.self_check import checked

if TYPE_CHECKING:
    from rebased.ops.decoding.norm import Norm

LOOP = {"BF": 32, "STAGES": 3, "num_warps": 1}  # BF: features that a program reads at a time


@triton.jit
def read_head(
    x, gamma, beta, h, eps, K: tl.constexpr, KP: tl.constexpr, N: tl.constexpr, BN: tl.constexpr,
    SHARED: tl.constexpr, NORM: tl.constexpr, CENTRE: tl.constexpr, HAS_GAMMA: tl.constexpr, HAS_BETA: tl.constexpr,
):  # fmt: skip
    """The K features of head h after their norm, [KP]; x points to those of all heads. N: over how many is normalised.

    SHARED: gamma and beta are [K], those of every head.
    """
    columns = tl.arange(0, KP)
    mask = columns < K
    given = tl.load(x + h * K + columns, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        first = tl.zeros([1], tl.int64)
        begin = x if N != K else x + h * K
        mean, inverse = row_statistics(begin, first, first == 0, eps, N, 1, BN, CENTRE)
        given = (given - tl.sum(mean, 0)) * tl.sum(inverse, 0)
    own = columns if SHARED else h * K + columns
    return tl.where(mask, scaled(given, gamma, beta, own, mask, HAS_GAMMA, HAS_BETA), 0.0)


@triton.jit
def poly_kernel(
    qkv, kv, z, o, scratch, first, second, weights, q_gamma, q_beta, k_gamma, k_beta, log_decay,
    H, q_eps, k_eps, eps,
    HEADS: tl.constexpr, F: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr, VP: tl.constexpr,
    N: tl.constexpr, BN: tl.constexpr, BF: tl.constexpr, STAGES: tl.constexpr, SHARED: tl.constexpr,
    Q_NORM: tl.constexpr, Q_CENTRE: tl.constexpr, Q_GAMMA: tl.constexpr, Q_BETA: tl.constexpr,
    K_NORM: tl.constexpr, K_CENTRE: tl.constexpr, K_GAMMA: tl.constexpr, K_BETA: tl.constexpr,
    GATED: tl.constexpr,
):  # fmt: skip
    """o [S, H, V] of qkv [S, H (2K + V)]; kv [S, H, F, V] and z [S, H, F] become the state after the token.

    Feature f is x_first[f] x_second[f], where x_K means 1; `weights` [F] multiply it on the query side. scratch
    [S, H, 2, KP] is where a program finds single numbers of its q and k again. GATED: the state fades by e^log_decay
    first; [S, H].
    """
    pid = tl.program_id(0)
    s = (pid // H).to(tl.int64)
    h = pid % H
    qkv += s * HEADS * (2 * K + V)
    q = read_head(qkv, q_gamma, q_beta, h, q_eps, K, KP, N, BN, SHARED, Q_NORM, Q_CENTRE, Q_GAMMA, Q_BETA)
    k = read_head(
        qkv + HEADS * K, k_gamma, k_beta, h, k_eps, K, KP, N, BN, SHARED, K_NORM, K_CENTRE, K_GAMMA, K_BETA
    )  # fmt: skip
    q_at = scratch + pid.to(tl.int64) * 2 * KP
    k_at = q_at + KP
    tl.store(q_at + tl.arange(0, KP), q)
    tl.store(k_at + tl.arange(0, KP), k)
    tl.debug_barrier()
    columns = tl.arange(0, VP)
    inside = columns < V
    value = tl.load(qkv + 2 * HEADS * K + h * V + columns, mask=inside, other=0.0).to(tl.float32)
    here = pid.to(tl.int64) * F
    acc = tl.zeros([VP], tl.float32)
    total = tl.zeros([BF], tl.float32)
    if GATED:
        fade = tl.exp(tl.load(log_decay + pid).to(tl.float32))
    for start in tl.range(0, F, BF, num_stages=STAGES):
        f = start + tl.arange(0, BF)
        known = f < F
        i = tl.load(first + f, mask=known, other=K)
        j = tl.load(second + f, mask=known, other=K)
        at = (here + f)[:, None] * V + columns[None, :]
        mask = known[:, None] & inside[None, :]
        before = tl.load(kv + at, mask=mask, other=0.0)
        sums = tl.load(z + here + f, mask=known, other=0.0)
        if GATED:
            before *= fade
            sums *= fade
        phi_k = tl.load(k_at + i, mask=i < K, other=1.0) * tl.load(k_at + j, mask=j < K, other=1.0)
        phi_q = tl.load(q_at + i, mask=i < K, other=1.0) * tl.load(q_at + j, mask=j < K, other=1.0)
        phi_q *= tl.load(weights + f, mask=known, other=0.0)
        state = before + phi_k[:, None] * value[None, :]
        tl.store(kv + at, state, mask=mask)
        acc += tl.sum(phi_q[:, None] * state, 0)
        sums += phi_k
        tl.store(z + here + f, sums, mask=known)
        total += phi_q * sums
    out = acc / (tl.sum(total, 0) + eps)
    tl.store(o + pid.to(tl.int64) * V + columns, out.to(o.dtype.element_ty), mask=inside)


def _compare(args, o, after):
    """Errors for some sequences, as many as have a million numbers of state."""
    qkv, state, q_norm, k_norm, heads, width, joint, (c0, c1, c2), scale, eps, log_decay = args
    numbers = some(len(qkv), max(2, 2**20 // (state.kv.numel() // len(qkv))))
    qkv, o = (pick(x, 0, numbers) for x in (qkv, o))
    before, after = (PolyState(*(pick(x, 0, numbers) for x in each)) for each in (state, after))
    q, k, v = qkv.double().split([heads * width] * 2 + [qkv.shape[1] - 2 * heads * width], dim=-1)
    q, k = (reference.normalise(x, norm, 1 if joint else heads) for x, norm in ((q, q_norm), (k, k_norm)))
    q, k, v, o = (x.unflatten(-1, (heads, -1)) for x in (q, k, v, o))
    gate, c = None if log_decay is None else pick(log_decay, 0, numbers), (c0, c1 * scale, c2 * scale**2)
    return step_errors(q, k, v, before, o, after, c, eps, normalised=True, log_decay=gate)


@checked(reference.poly_, compare=_compare)
def poly_(
    qkv: Tensor,
    state: PolyState,
    q_norm: "Norm | None",
    k_norm: "Norm | None",
    heads: int,
    key_width: int,
    joint: bool,
    coefficients: Coefficients,
    scale: float,
    eps: float,
    log_decay: Tensor | None = None,
) -> Tensor:
    """See api.poly_step_."""
    S, (F, V) = len(qkv), state.kv.shape[2:]
    VP, programs = max(16, triton.next_power_of_2(V)), len(qkv) * heads
    first, second, weights = monomials(key_width, coefficients, scale, qkv.device)
    normalised = heads * key_width if joint else key_width
    KP = max(16, triton.next_power_of_2(key_width))
    scratch = torch.empty(programs, 2, KP, device=qkv.device, dtype=torch.float32)
    widths = {len(norm.weight) for norm in (q_norm, k_norm) if norm is not None and norm.weight is not None}
    o = qkv.new_empty(S, heads * V)
    launch(
        poly_kernel, (programs,),
        qkv.contiguous(), *state, o, scratch, first, second, weights,
        *_numbers(q_norm), *_numbers(k_norm), None if log_decay is None else log_decay.contiguous(),
        heads, *(1.0 if norm is None else norm.eps for norm in (q_norm, k_norm)),
        eps,
        HEADS=heads, F=F, K=key_width, KP=KP, V=V, VP=VP,
        N=normalised, BN=min(1024, triton.next_power_of_2(normalised)),
        SHARED=widths == {key_width},
        **_flags("Q", q_norm), **_flags("K", k_norm), **LOOP, GATED=log_decay is not None, overwrites=(*state,),
    )  # fmt: skip
    return o


def _numbers(norm: "Norm | None") -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if norm is None else (norm.weight, norm.bias)


def _flags(name: str, norm: "Norm | None") -> dict[str, bool]:
    return {
        f"{name}_NORM": norm is not None and norm.kind != "none",
        f"{name}_CENTRE": norm is not None and norm.kind == "layer",
        f"{name}_GAMMA": norm is not None and norm.weight is not None,
        f"{name}_BETA": norm is not None and norm.bias is not None,
    }
