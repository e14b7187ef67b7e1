"""LayerNorm and RMSNorm over the last axis, with sums in fp32 and a result in the dtype that its reader wants.

torch's kernels give a row of 64 features a block of threads of its own, and under autocast a cast before and after.
"""

import torch
from torch import Tensor
from torch.nn import functional

from rebased.ops.linear_scan import scan_path
from rebased.ops.polynomial.state import state_dtype

MAX_WIDTH = 8192  # features of a row that a kernel takes


def layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float = 1e-5,
    *,
    dtype: torch.dtype | None = None,
    residual: bool = False,
) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias, in `dtype` (x's unless given); with `residual`, added to x."""
    return _norm(x, weight, bias, eps, dtype or x.dtype, centre=True, residual=residual)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float = 1e-5, *, dtype: torch.dtype | None = None) -> Tensor:
    """x / sqrt(mean of x^2 + eps) * weight, in `dtype` (x's unless given)."""
    return _norm(x, weight, None, eps, dtype or x.dtype, centre=False, residual=False)


def _norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, dtype: torch.dtype, centre: bool, residual: bool
) -> Tensor:
    # A compiler fuses the plain norm with what stands around it; to it a kernel of ours would be a wall.
    if scan_path("auto", x) == "triton" and x.shape[-1] <= MAX_WIDTH and not torch.compiler.is_compiling():
        from rebased.ops.norm_triton import norm

        return norm(x, weight, bias, eps, dtype, centre, residual)
    wide = state_dtype(x.dtype)
    weight, bias = (None if each is None else each.to(wide) for each in (weight, bias))
    if centre:
        y = functional.layer_norm(x.to(wide), x.shape[-1:], weight, bias, eps)
    else:
        y = functional.rms_norm(x.to(wide), x.shape[-1:], weight, eps)
    return (x + y if residual else y).to(dtype)
