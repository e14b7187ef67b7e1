"""Causal depth-wise convolutions over time: short (a few taps) and long (as long as the sequence)."""
