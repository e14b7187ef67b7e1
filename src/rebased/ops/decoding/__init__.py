"""One token of every sequence, forward only: what a step of decoding computes, in as few kernels as possible."""

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

__all__ = [
    "Norm",
    "NormKind",
    "advance_slots_",
    "best_tokens",
    "embed_step",
    "gated_conv_step_",
    "linear_step",
    "mlp_step",
    "poly_step_",
]
