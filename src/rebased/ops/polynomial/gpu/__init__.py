"""Triton kernels for polynomial attention. Import it only where Triton is: the public face does so when it is asked."""

from rebased.ops.polynomial.gpu.operators import attend, extend

__all__ = ["attend", "extend"]
