"""torch's norms with our kernels, and a result in the dtype of what reads it."""

import torch
from torch import Tensor, nn

from rebased.ops import layer_norm, rms_norm


class LayerNorm(nn.LayerNorm):
    def forward(self, x: Tensor, *, dtype: torch.dtype | None = None, residual: bool = False) -> Tensor:
        """In x's dtype unless told otherwise, under autocast too: an answer is not cast twice. With `residual`, x and
        its norm added up."""
        return layer_norm(x, self.weight, self.bias, self.eps, dtype=dtype, residual=residual)


class RMSNorm(nn.RMSNorm):
    eps: float

    def forward(self, x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
        return rms_norm(x, self.weight, self.eps, dtype=dtype)


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which x will be multiplied: autocast's, where it is on."""
    device = x.device.type
    if x.dtype == torch.float32 and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return x.dtype
