"""LayerNorm and RMSNorm over the last axis."""

from rebased.ops.norm.api import layer_norm, linear_layer_norm, rms_norm

__all__ = ["layer_norm", "linear_layer_norm", "rms_norm"]
