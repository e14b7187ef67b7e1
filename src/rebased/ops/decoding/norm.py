"""A norm as the functions of a decoding step take it."""

from typing import Literal, NamedTuple

from torch import Tensor

NormKind = Literal["layer", "rms", "none"]
"""LayerNorm, RMSNorm, or scale and shift alone."""


class Norm(NamedTuple):
    """A norm over the last axis, as numbers."""

    weight: Tensor | None  # [D]; None: 1
    bias: Tensor | None  # [D]; None: 0
    eps: float
    kind: NormKind
