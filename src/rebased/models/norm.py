"""torch's norms with the kernels of rebased.ops; the caller chooses the dtype of the result."""

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

    def forward(self, x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
        """Return the norm of x [..., D] in `dtype`, which is x's unless given."""
        return rms_norm(x, self.weight, self.eps, dtype=dtype)
