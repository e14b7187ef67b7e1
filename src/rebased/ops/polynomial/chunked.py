"""Polynomial attention in linear time, plain torch: the CPU's path and the second witness."""

from rebased.ops.polynomial.reference import attend, extend  # noqa: F401
