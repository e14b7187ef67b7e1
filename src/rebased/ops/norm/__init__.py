"""LayerNorm and RMSNorm over the last axis."""
