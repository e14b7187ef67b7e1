"""The token shift of RWKV: mixtures of each token with the one before it."""

from rebased.ops.shift.api import token_shift

__all__ = ["token_shift"]
