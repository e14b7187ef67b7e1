"""LayerNorm and RMSNorm over the last axis, with sums in fp32 and a result in any dtype.

torch's own kernels start one thread block per row, also for rows of 64 features, and need a cast before and after under
autocast. On a GPU the kernels of gpu.py are used instead.
"""

import torch
from torch import Tensor
from torch.nn import functional

from rebased.ops.backend import accumulate_dtype, kernel_path

MAX_WIDTH = 8192  # features per row that a kernel takes


def layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float = 1e-5,
    *,
    dtype: torch.dtype | None = None,
    residual: bool = False,
) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias, over the last axis.

    Args:
        x: [..., D], any float dtype. Sums are in fp32 (fp64 for fp64).
        weight: [D], or None for 1.
        bias: [D], or None for 0.
        eps: added to the variance.
        dtype: of the result; None means the dtype of x.
        residual: if True, the result is x plus the norm.

    Returns:
        [..., D] in `dtype`.
    """
    return _norm(x, weight, bias, eps, dtype or x.dtype, centre=True, residual=residual)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float = 1e-5, *, dtype: torch.dtype | None = None) -> Tensor:
    """x / sqrt(mean of x^2 + eps) * weight, over the last axis.

    Args:
        x: [..., D], any float dtype. Sums are in fp32 (fp64 for fp64).
        weight: [D], or None for 1.
        eps: added to the mean of the squares.
        dtype: of the result; None means the dtype of x.

    Returns:
        [..., D] in `dtype`.
    """
    return _norm(x, weight, None, eps, dtype or x.dtype, centre=False, residual=False)


def _norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, dtype: torch.dtype, centre: bool, residual: bool
) -> Tensor:
    # torch.compile fuses a norm in plain torch with the operations around it; it cannot fuse a custom kernel.
    if kernel_path("auto", x) == "triton" and x.shape[-1] <= MAX_WIDTH and not torch.compiler.is_compiling():
        from rebased.ops.norm.gpu import norm

        return norm(x, weight, bias, eps, dtype, centre, residual)
    wide = accumulate_dtype(x.dtype)
    weight, bias = (None if each is None else each.to(wide) for each in (weight, bias))
    if centre:
        y = functional.layer_norm(x.to(wide), x.shape[-1:], weight, bias, eps)
    else:
        y = functional.rms_norm(x.to(wide), x.shape[-1:], weight, eps)
    return (x + y if residual else y).to(dtype)
