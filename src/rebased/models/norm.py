"""torch's norms with the kernels of rebased.ops; the caller chooses the dtype of the result."""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from rebased.ops import layer_norm, rms_norm


class LayerNorm(nn.LayerNorm):
    """torch.nn.LayerNorm over the last axis, with sums in fp32 (fp64 for fp64)."""

    def forward(self, x: Tensor, *, dtype: torch.dtype | None = None, residual: bool = False) -> Tensor:
        """Return the norm of x [..., D], or x plus its norm with `residual`; in `dtype`, which is x's unless given.

        Autocast does not change the dtype, so that the result is not cast twice.
        """
        return layer_norm(x, self.weight, self.bias, self.eps, dtype=dtype, residual=residual)


class RMSNorm(nn.RMSNorm):
    """torch.nn.RMSNorm over the last axis, with sums in fp32 (fp64 for fp64)."""

    eps: float

    def forward(self, x: Tensor, *, dtype: torch.dtype | None = None, residual: bool = False) -> Tensor:
        """Return the norm of x [..., D], or x plus its norm with `residual`; in `dtype`, which is x's unless given."""
        y = rms_norm(x, self.weight, self.eps, dtype=dtype)
        return x + y if residual else y


def build_norm(kind: Literal["layer", "rms"], width: int, **factory: Any) -> LayerNorm | RMSNorm:
    """Return the norm of this kind over `width` features, with eps 1e-5; `factory` as in torch.nn.Linear."""
    return RMSNorm(width, eps=1e-5, **factory) if kind == "rms" else LayerNorm(width, **factory)
