"""Causal depth-wise convolutions over time: short (a few taps) and long (as long as the sequence)."""

from rebased.ops.convolution.api import long_conv, long_conv_extend, short_conv, short_conv_extend

__all__ = ["long_conv", "long_conv_extend", "short_conv", "short_conv_extend"]
