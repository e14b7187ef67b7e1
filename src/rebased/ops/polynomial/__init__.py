"""Polynomial attention: ReBased and Based as one operator, with coefficients (0, 0, 1) and (1, 1, 1/2)."""

from rebased.ops.polynomial.api import (
    BASED,
    EPS,
    REBASED,
    poly_at_pays,
    poly_attention,
    poly_attention_at,
    poly_attention_extend,
    poly_attention_extend_,
    poly_attention_map,
    poly_state,
)
from rebased.ops.polynomial.learned import COMPLETED, complete_square
from rebased.ops.polynomial.state import (
    AnyCoefficients,
    Coefficients,
    PolyState,
    feature_count,
    init_poly_state,
    pair_products,
)

__all__ = [
    "BASED",
    "COMPLETED",
    "EPS",
    "REBASED",
    "AnyCoefficients",
    "Coefficients",
    "PolyState",
    "complete_square",
    "feature_count",
    "init_poly_state",
    "pair_products",
    "poly_at_pays",
    "poly_attention",
    "poly_attention_at",
    "poly_attention_extend",
    "poly_attention_extend_",
    "poly_attention_map",
    "poly_state",
]
