"""Polynomial attention one token at a time, from the state alone: what decoding computes, in plain torch.

A product of features and state cancels where a query is nearly orthogonal to its keys, and gradients divide by it. So
`attend` and `extend` compute in fp64; one step of decoding has no gradient and stays in the dtype of its state.
"""

import torch
from torch import Tensor
from torch.nn import functional

from rebased.ops.backend import accumulate_dtype
from rebased.ops.polynomial.state import (
    AnyCoefficients,
    PolyState,
    divisor,
    init_poly_state,
    key_features,
    query_features,
)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    coefficients: AnyCoefficients,
    scale: float,
    eps: float,
    log_decay: Tensor | None = None,
) -> Tensor:
    """o [B, T, H, V] of q, k [B, T, H, K] and v [B, T, H, V]."""
    B, _, H, K = q.shape
    state = init_poly_state(B, H, K, v.shape[-1], coefficients, device=q.device, dtype=q.dtype)
    return extend(q, k, v, state, coefficients=coefficients, scale=scale, eps=eps, log_decay=log_decay)[0]


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
    dtype = torch.float64 if q.device.type != "mps" else accumulate_dtype(q.dtype)
    state_dtype, state = state.kv.dtype, PolyState(*(x.to(dtype) for x in state))
    phi_q = query_features(q.to(dtype), coefficients, scale)  # [B, T, H, F]
    phi_k = key_features(k.to(dtype), coefficients)  # [B, T, H, F]
    values = v.to(dtype)
    outputs = []
    for t in range(q.shape[1]):
        if log_decay is not None:
            kept = log_decay[:, t].to(dtype).exp().unsqueeze(-1)  # [B, H, 1]
            state = PolyState(state.kv * kept.unsqueeze(-1), state.z * kept)
        state = PolyState(
            kv=torch.addcmul(state.kv, phi_k[:, t].unsqueeze(-1), values[:, t].unsqueeze(-2)),
            z=state.z + phi_k[:, t],
        )
        numerator = (phi_q[:, t].unsqueeze(-2) @ state.kv).squeeze(-2)  # [B, H, V]
        denominator = (phi_q[:, t] * state.z).sum(-1, keepdim=True)  # [B, H, 1]
        outputs.append(numerator / divisor(denominator, eps))
    return torch.stack(outputs, dim=1).to(v.dtype), PolyState(*(x.to(state_dtype) for x in state))


def attend_all(q: Tensor, k: Tensor, v: Tensor, *, coefficients: AnyCoefficients, scale: float, eps: float) -> Tensor:
    """attend without a mask: every token sees all tokens, through the state after the last one."""
    dtype = torch.float64 if q.device.type != "mps" else accumulate_dtype(q.dtype)
    phi_q = query_features(q.to(dtype), coefficients, scale)  # [B, T, H, F]
    phi_k = key_features(k.to(dtype), coefficients)  # [B, T, H, F]
    state = torch.einsum("bjhf,bjhv->bhfv", phi_k, functional.pad(v.to(dtype), (0, 1), value=1.0))  # [B, H, F, V+1]
    sums = torch.einsum("bihf,bhfv->bihv", phi_q, state)
    return (sums[..., :-1] / divisor(sums[..., -1:], eps)).to(v.dtype)


def extend_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: PolyState,
    *,
    coefficients: AnyCoefficients,
    scale: float,
    eps: float,
    log_decay: Tensor | None = None,
) -> Tensor:
    """o [B, 1, H, V] of one token that follows a state. The state is overwritten by the one after it."""
    dtype = accumulate_dtype(q.dtype)
    phi_q = query_features(q[:, 0].to(dtype), coefficients, scale)  # [B, H, F]
    phi_k = key_features(k[:, 0].to(dtype), coefficients)  # [B, H, F]
    if log_decay is not None:
        kept = log_decay.to(dtype).exp().transpose(1, 2)  # [B, H, 1]
        state.kv.mul_(kept.unsqueeze(-1))
        state.z.mul_(kept)
    state.kv.addcmul_(phi_k.unsqueeze(-1), v[:, 0].to(dtype).unsqueeze(-2))
    state.z.add_(phi_k)
    numerator = (phi_q.unsqueeze(-2) @ state.kv).squeeze(-2)  # [B, H, V]
    denominator = (phi_q * state.z).sum(-1, keepdim=True)  # [B, H, 1]
    return (numerator / divisor(denominator, eps)).unsqueeze(1).to(v.dtype)
