"""The delta rule: attention whose state is corrected, not only added to. Degree 1 (DeltaNet) and degree 2 (squares)."""

from rebased.ops.delta.api import (
    Degree,
    delta_attention,
    delta_attention_extend,
    delta_coefficients,
    init_delta_state,
)

__all__ = ["Degree", "delta_attention", "delta_attention_extend", "delta_coefficients", "init_delta_state"]
