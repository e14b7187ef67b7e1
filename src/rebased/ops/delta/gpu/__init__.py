"""The Triton kernels of the delta rule: degree 1 and 2, one decay per head or none."""
