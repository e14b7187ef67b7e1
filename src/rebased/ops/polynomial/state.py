"""The state of polynomial attention and the features it is made of.

    s = scale * (q . k),   sim = c0 + c1 s + c2 s^2 = <phi_q(q), phi_k(k)>

phi_k holds bare monomials in this order, degree d only if c_d != 0:  1;  k_a;  k_a k_b for a <= b (row by row).
Everything else (coefficients, powers of the scale, the factor 2 of a pair a < b) is on the query side, so a state does
not depend on the scale, and negative coefficients need no square root.
"""

import math
from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from rebased.ops.backend import accumulate_dtype

Coefficients = tuple[float, float, float]
AnyCoefficients = Coefficients | Tensor
"""(c0, c1, c2) as numbers, or as a tensor [3] that may want gradients: then all three degrees have features."""
EVERY_DEGREE: Coefficients = (1.0, 1.0, 1.0)


class PolyState(NamedTuple):
    """All that polynomial attention remembers of the past, in fp32 (fp64 for fp64 inputs), whatever its length."""

    kv: Tensor  # [B, H, F, V]: sum over tokens of phi_k(k) v
    z: Tensor  # [B, H, F]: sum over tokens of phi_k(k)


def layout(coefficients: AnyCoefficients) -> Coefficients:
    """Numbers that are zero where a degree has no features: the coefficients, or EVERY_DEGREE for a tensor."""
    return EVERY_DEGREE if isinstance(coefficients, Tensor) else coefficients


def feature_count(key_width: int, coefficients: AnyCoefficients) -> int:
    """F, the number of features for keys of this width: at width 16, 136 for ReBased and 153 for Based."""
    c0, c1, c2 = layout(coefficients)
    return (c0 != 0) + (c1 != 0) * key_width + (c2 != 0) * key_width * (key_width + 1) // 2


def init_poly_state(
    batch: int,
    heads: int,
    key_width: int,
    value_width: int,
    coefficients: AnyCoefficients,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> PolyState:
    """The state before the first token: zeros.

    Args:
        batch: B.
        heads: H.
        key_width: K.
        value_width: V.
        coefficients: (c0, c1, c2) of the similarity; they decide which features there are.
        device: of the state; None means torch's default.
        dtype: of the inputs. The state is fp32, or fp64 for fp64 inputs.

    Returns:
        A PolyState with kv [B, H, F, V] and z [B, H, F].
    """
    features = feature_count(key_width, coefficients)
    kv = torch.zeros(batch, heads, features, value_width, device=device, dtype=accumulate_dtype(dtype))
    return PolyState(kv=kv, z=kv.new_zeros(batch, heads, features))


def divisor(similarities: Tensor, eps: float) -> Tensor:
    """What values are divided by: a sum of similarities, plus eps. NaN where it is infinite: a finite sum of values
    divided by infinity would be a zero that looks like a result."""
    return (similarities + eps).nan_to_num(nan=math.nan, posinf=math.nan, neginf=math.nan)


Function = TypeVar("Function", bound=Callable[..., Any])


def cached(function: Function) -> Function:
    """The function with a cache of 64 results. torch.compile traces it without the cache, which it would warn about."""
    keeping = lru_cache(maxsize=64)(function)

    @wraps(function)
    def call(*args: Any) -> Any:
        return function(*args) if torch.compiler.is_compiling() else keeping(*args)

    return call  # type: ignore[return-value]


@cached
def pair_indices(key_width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(a, b), the column numbers of the second-degree features: all a <= b, row by row; int64 [K (K + 1) / 2] each."""
    with torch.inference_mode(False):  # cached for later calls, which may need gradients
        rows, columns = torch.triu_indices(key_width, key_width, device=device)
    return rows, columns


def pair_products(x: Tensor) -> Tensor:
    """x_a^2, and sqrt(2) x_a x_b for a < b: [..., K] -> [..., K (K + 1) / 2].

    So <pair_products(q), pair_products(k)> = (q . k)^2.
    """
    a, b = pair_indices(x.shape[-1], x.device)
    return x[..., a] * x[..., b] * (1 + (2**0.5 - 1) * (a != b).to(x.dtype))


def key_features(k: Tensor, coefficients: AnyCoefficients) -> Tensor:
    """phi_k: [..., K] -> [..., F]."""
    c0, c1, c2 = layout(coefficients)
    terms = []
    if c0 != 0:
        terms.append(torch.ones_like(k[..., :1]))
    if c1 != 0:
        terms.append(k)
    if c2 != 0:
        a, b = pair_indices(k.shape[-1], k.device)
        terms.append(k[..., a] * k[..., b])
    return torch.cat(terms, dim=-1)


def query_weights(
    key_width: int, coefficients: AnyCoefficients, scale: float, *, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """[F]: the weight of each monomial on the query side, phi_q(q) = weights * phi_k(q)."""
    if isinstance(coefficients, Tensor):
        c = coefficients.to(dtype)
        a, b = pair_indices(key_width, device)
        pairs = scale**2 * (1.0 + (a != b).to(dtype))
        return torch.cat([c[:1], c[1:2] * scale * torch.ones(key_width, device=device, dtype=dtype), c[2:] * pairs])
    c0, c1, c2 = coefficients
    terms = []
    if c0 != 0:
        terms.append(torch.full((1,), c0, device=device, dtype=dtype))
    if c1 != 0:
        terms.append(torch.full((key_width,), c1 * scale, device=device, dtype=dtype))
    if c2 != 0:
        a, b = pair_indices(key_width, device)
        terms.append(c2 * scale**2 * (1.0 + (a != b).to(dtype)))
    return torch.cat(terms)


def query_features(q: Tensor, coefficients: AnyCoefficients, scale: float) -> Tensor:
    """phi_q: [..., K] -> [..., F]."""
    weights = query_weights(q.shape[-1], coefficients, scale, device=q.device, dtype=q.dtype)
    return weights * key_features(q, coefficients)
