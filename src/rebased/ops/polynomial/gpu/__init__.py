"""Triton kernels for polynomial attention. Importing this package imports Triton; api.py does so when it is needed."""

from rebased.ops.polynomial.gpu.operators import attend, attend_at, extend, extend_

__all__ = ["attend", "attend_at", "extend", "extend_"]
