"""Polynomial attention as the equation says it, quadratic in T. In fp64, every other path is tested against it.

    o_i = sum_{j<=i} sim_ij v_j / (sum_{j<=i} sim_ij + eps),   sim = c0 + c1 s + c2 s^2,   s = scale * (q . k)

A gate multiplies sim_ij by e^(g_(j+1) + ... + g_i), with log decays g.
Half precision is computed in fp32 (eps is below the smallest fp16 number); every other dtype in itself.
"""

from typing import Any

import torch
from torch import Tensor

from rebased.ops.backend import accumulate_dtype
from rebased.ops.polynomial.gates import bounded
from rebased.ops.polynomial.state import AnyCoefficients, PolyState, divisor, key_features, query_features


def similarity(
    q: Tensor,
    k: Tensor,
    *,
    coefficients: AnyCoefficients,
    scale: float,
    log_decay: Tensor | None = None,
    positions: Tensor | None = None,
) -> Tensor:
    """sim_ij, zero for j > i: q [B, n, H, K], k [B, T, H, K], log_decay [B, T, H] -> [B, H, n, T].

    Queries stand at positions [B, n]; None: one at each of the T.
    """
    c0, c1, c2 = coefficients
    s = scale * torch.einsum("bihk,bjhk->bhij", q, k)
    sim = c0 + s * (c1 + c2 * s)
    if positions is None:
        sim = sim.tril()
    else:
        sim = torch.where(positions[:, None, :, None] >= torch.arange(k.shape[1], device=k.device), sim, 0)
    return sim if log_decay is None else sim * decay_between(log_decay, positions).to(sim.dtype)


def decay_between(log_decay: Tensor, positions: Tensor | None = None) -> Tensor:
    """e^(g_(j+1) + ... + g_i) for j <= i, else zero: g [B, T, H] -> [B, H, T, T]; i at positions [B, n] if given."""
    total = bounded(log_decay).double().cumsum(1).transpose(1, 2)  # [B,H,T]; differences in fp32 would be too coarse
    numbers = torch.arange(total.shape[2], device=total.device)
    at = numbers.expand(total.shape[0], -1) if positions is None else positions  # [B,n]
    ends = total.gather(2, at.unsqueeze(1).expand(-1, total.shape[1], -1)).unsqueeze(3)  # [B,H,n,1]
    later = (numbers > at.unsqueeze(-1)).unsqueeze(1)  # [B,1,n,T]
    return (ends - total.unsqueeze(2)).masked_fill(later, -torch.inf).exp()


def sum_values(sim: Tensor, v: Tensor, positions: Tensor | None = None) -> Tensor:
    """sum_{j<=i} sim_ij v_j: sim [B, H, n, T], zero for j > i, and v [B, T, H, V] -> [B, n, H, V].

    A v that is NaN or infinite reaches no earlier token, though zero times NaN is NaN: sums are taken without it, and
    are NaN or infinite themselves from its token on.
    """
    finite = v.isfinite()
    sums = torch.einsum("bhij,bjhv->bihv", sim, torch.where(finite, v, 0))
    met = torch.where(finite, 0, v).cumsum(1)
    if positions is not None:
        met = met.gather(1, positions[:, :, None, None].expand(-1, -1, *v.shape[2:]))
    return torch.where(met == 0, sums, met)


def attend(q: Tensor, k: Tensor, v: Tensor, *, positions: Tensor | None = None, eps: float, **similar: Any) -> Tensor:
    """o [B, T, H, V] of q, k [B, T, H, K] and v [B, T, H, V]; further arguments are those of `similarity`."""
    dtype = accumulate_dtype(q.dtype)
    sim = similarity(q.to(dtype), k.to(dtype), positions=positions, **similar)
    numerator = sum_values(sim, v.to(dtype), positions)
    denominator = sim.sum(-1).transpose(1, 2).unsqueeze(-1)  # [B,n,H,1]
    return (numerator / divisor(denominator, eps)).to(v.dtype)


def attend_at(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, **numbers: Any) -> Tensor:
    """attend of queries q [B, n, H, K] that stand at positions [B, n]: [B, n, H, V]."""
    return attend(q, k, v, positions=positions, **numbers)


def attention_matrix(q: Tensor, k: Tensor, *, eps: float, **similar: Any) -> Tensor:
    """sim_ij / (sum_{j<=i} sim_ij + eps), zero for j > i: q, k [B, T, H, K] -> [B, H, T, T], at least fp32."""
    dtype = accumulate_dtype(q.dtype)
    sim = similarity(q.to(dtype), k.to(dtype), **similar)
    return sim / divisor(sim.sum(-1, keepdim=True), eps)


def extend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: PolyState,
    *,
    coefficients: AnyCoefficients,
    scale: float,
    eps: float,
    log_decay: Tensor | None = None,
) -> tuple[Tensor, PolyState]:
    """attend for tokens that follow a state, and the state after them."""
    dtype = accumulate_dtype(q.dtype)
    out_dtype, (q, k, v) = v.dtype, (x.to(dtype) for x in (q, k, v))
    sim = similarity(q, k, coefficients=coefficients, scale=scale, log_decay=log_decay)
    phi_q = query_features(q, coefficients, scale)  # [B,T,H,F]
    phi_k = key_features(k, coefficients)  # [B,T,H,F]
    kv, z = state
    if log_decay is not None and q.shape[1] > 0:
        # The state fades until it is read, and the keys and the state until the last token.
        since = bounded(log_decay).double().cumsum(1).unsqueeze(-1)  # [B,T,H,1]
        phi_q, phi_k = phi_q * since.exp().to(dtype), phi_k * (since[:, -1:] - since).exp().to(dtype)
        kept = since[:, -1].exp().to(dtype)  # [B,H,1]
        kv, z = kv * kept.unsqueeze(-1), z * kept
    numerator = sum_values(sim, v) + torch.einsum("bihf,bhfv->bihv", phi_q, state.kv)
    denominator = sim.sum(-1).transpose(1, 2) + torch.einsum("bihf,bhf->bih", phi_q, state.z)
    after = PolyState(
        kv=kv + torch.einsum("bjhf,bjhv->bhfv", phi_k, v),
        z=z + phi_k.sum(1).to(dtype),
    )
    return (numerator / divisor(denominator, eps).unsqueeze(-1)).to(out_dtype), after
