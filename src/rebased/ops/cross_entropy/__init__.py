"""Cross-entropy and argmax of a linear head, without its logits."""

from rebased.ops.cross_entropy.api import linear_argmax, linear_cross_entropy
from rebased.ops.cross_entropy.reference import IGNORE

__all__ = ["IGNORE", "linear_argmax", "linear_cross_entropy"]
