"""Functions on tensors. They need only torch, and triton for the kernels on a GPU.

Every operator has a folder. `api.py` holds its public functions, which check their inputs and choose a path.
`reference.py`, `chunked.py` and `gpu` (a file or a folder) compute backend="reference", "chunked" and "triton".
"""

from rebased.ops.backend import Backend, use_backend
from rebased.ops.convolution.api import long_conv, long_conv_extend, short_conv, short_conv_extend
from rebased.ops.cross_entropy.api import linear_argmax, linear_cross_entropy
from rebased.ops.cross_entropy.reference import IGNORE
from rebased.ops.decoding.api import (
    advance_slots_,
    best_tokens,
    embed_step,
    gated_conv_step_,
    linear_step,
    mlp_step,
    poly_step_,
)
from rebased.ops.decoding.norm import Norm, NormKind
from rebased.ops.delta.api import (
    Degree,
    delta_attention,
    delta_attention_extend,
    delta_attention_extend_,
    delta_coefficients,
    delta_packs,
    init_delta_state,
)
from rebased.ops.embedding.api import embed
from rebased.ops.invariance import batch_invariant
from rebased.ops.norm.api import layer_norm, linear_layer_norm, rms_norm
from rebased.ops.polynomial.api import (
    BASED,
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
from rebased.ops.rwkv.api import wkv, wkv_extend
from rebased.ops.rwkv.state import WKVState, init_wkv_state
from rebased.ops.scan.api import selective_scan, selective_scan_extend
from rebased.ops.shift.api import token_shift

__all__ = [
    "BASED",
    "COMPLETED",
    "IGNORE",
    "REBASED",
    "AnyCoefficients",
    "Backend",
    "Coefficients",
    "Degree",
    "Norm",
    "NormKind",
    "PolyState",
    "WKVState",
    "advance_slots_",
    "batch_invariant",
    "best_tokens",
    "complete_square",
    "delta_attention",
    "delta_attention_extend",
    "delta_attention_extend_",
    "delta_coefficients",
    "delta_packs",
    "embed",
    "embed_step",
    "feature_count",
    "gated_conv_step_",
    "init_delta_state",
    "init_poly_state",
    "init_wkv_state",
    "layer_norm",
    "linear_argmax",
    "linear_cross_entropy",
    "linear_layer_norm",
    "linear_step",
    "long_conv",
    "long_conv_extend",
    "mlp_step",
    "pair_products",
    "poly_at_pays",
    "poly_attention",
    "poly_attention_at",
    "poly_attention_extend",
    "poly_attention_extend_",
    "poly_attention_map",
    "poly_state",
    "poly_step_",
    "rms_norm",
    "selective_scan",
    "selective_scan_extend",
    "short_conv",
    "short_conv_extend",
    "token_shift",
    "use_backend",
    "wkv",
    "wkv_extend",
]
