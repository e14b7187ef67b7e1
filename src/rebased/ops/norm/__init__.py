"""LayerNorm and RMSNorm over the last axis."""

from rebased.ops.norm.api import layer_norm, rms_norm

__all__ = ["layer_norm", "rms_norm"]
