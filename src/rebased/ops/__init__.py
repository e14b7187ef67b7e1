"""Functions on tensors. Needs torch alone (and triton for the GPU's kernels)."""

from rebased.ops.backend import Backend, use_backend
from rebased.ops.convolution import short_conv, short_conv_extend
from rebased.ops.polynomial import (
    BASED,
    REBASED,
    Coefficients,
    PolyState,
    feature_count,
    init_poly_state,
    poly_attention,
    poly_attention_extend,
)

__all__ = [
    "BASED",
    "REBASED",
    "Backend",
    "Coefficients",
    "PolyState",
    "feature_count",
    "init_poly_state",
    "poly_attention",
    "poly_attention_extend",
    "short_conv",
    "short_conv_extend",
    "use_backend",
]
