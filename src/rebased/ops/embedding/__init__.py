"""Rows of a table by number."""

from rebased.ops.embedding.api import embed

__all__ = ["embed"]
