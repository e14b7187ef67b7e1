"""The state of polynomial attention and the features it is made of.

    s = scale * (q . k),   sim = c0 + c1 s + c2 s^2 = <phi_q(q), phi_k(k)>

phi_k holds bare monomials, in this order, an order d only where c_d != 0:  1;  k_a;  k_a k_b for a <= b (row by row).
Everything else (coefficients, powers of the scale, the 2 that a pair a < b counts for) sits on the query's side,
so a state does not depend on scale, and negative coefficients need no square root.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from rebased.ops.backend import accumulate_dtype

Coefficients = tuple[float, float, float]


class PolyState(NamedTuple):
    """All that polynomial attention remembers of the past: its size does not depend on how long that past is."""

    kv: Tensor  # [B, H, F, V]  sum over tokens of phi_k(k) v
    z: Tensor  # [B, H, F]     sum over tokens of phi_k(k)


def feature_count(key_width: int, coefficients: Coefficients) -> int:
    """F: 136 for ReBased and 153 for Based at a key width of 16."""
    c0, c1, c2 = coefficients
    return (c0 != 0) + (c1 != 0) * key_width + (c2 != 0) * key_width * (key_width + 1) // 2


def init_poly_state(
    batch: int,
    heads: int,
    key_width: int,
    value_width: int,
    coefficients: Coefficients,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> PolyState:
    """The state before the first token: zeros. `dtype` is that of the inputs; the state's own follows from it."""
    features = feature_count(key_width, coefficients)
    kv = torch.zeros(batch, heads, features, value_width, device=device, dtype=accumulate_dtype(dtype))
    return PolyState(kv=kv, z=kv.new_zeros(batch, heads, features))


@lru_cache(maxsize=64)
def pair_indices(key_width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(a, b) with a <= b, row by row: the order of the second-degree features."""
    with torch.inference_mode(False):  # kept for later calls, which may need gradients
        rows, columns = torch.triu_indices(key_width, key_width, device=device)
    return rows, columns


def key_features(k: Tensor, coefficients: Coefficients) -> Tensor:
    """phi_k: [..., K] -> [..., F]."""
    c0, c1, c2 = coefficients
    parts = []
    if c0 != 0:
        parts.append(torch.ones_like(k[..., :1]))
    if c1 != 0:
        parts.append(k)
    if c2 != 0:
        a, b = pair_indices(k.shape[-1], k.device)
        parts.append(k[..., a] * k[..., b])
    return torch.cat(parts, dim=-1)


def query_weights(
    key_width: int, coefficients: Coefficients, scale: float, *, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """[F]: what stands before each monomial on the query's side, phi_q(q) = weights * phi_k(q)."""
    c0, c1, c2 = coefficients
    parts = []
    if c0 != 0:
        parts.append(torch.full((1,), c0, device=device, dtype=dtype))
    if c1 != 0:
        parts.append(torch.full((key_width,), c1 * scale, device=device, dtype=dtype))
    if c2 != 0:
        a, b = pair_indices(key_width, device)
        parts.append(c2 * scale**2 * (1.0 + (a != b).to(dtype)))
    return torch.cat(parts)


def query_features(q: Tensor, coefficients: Coefficients, scale: float) -> Tensor:
    """phi_q: [..., K] -> [..., F]."""
    weights = query_weights(q.shape[-1], coefficients, scale, device=q.device, dtype=q.dtype)
    return weights * key_features(q, coefficients)
