"""LayerNorm and RMSNorm over the last axis, with sums in fp32 and a result in any dtype.

torch's own kernels start one thread block per row, also for rows of 64 features, and need a cast before and after under
autocast. On a GPU the kernels of gpu.py are used instead.
"""

import torch
from torch import Tensor
from torch.nn import functional

from rebased.ops.backend import kernel_path, matmul_dtype
from rebased.ops.derivatives import in_forward_mode
from rebased.ops.invariance import is_batch_invariant
from rebased.ops.norm import reference

MAX_FEATURES = 8192  # of a row, that a kernel takes


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
        x, weight, dtype: as in layer_norm.
        eps: added to the mean of the squares.

    Returns:
        [..., D] in `dtype`.
    """
    return _norm(x, weight, None, eps, dtype or x.dtype, centre=False, residual=False)


def linear_layer_norm(
    x: Tensor, projection: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float = 1e-5
) -> Tensor:
    """The layer_norm of x @ projection.T, computed together on a GPU where both are narrow and fp32 is not asked for.

    Args:
        x: [..., D], any float dtype.
        projection: [N, D]. Under autocast the product is in autocast's dtype, and so is the result.
        weight: [N], or None for 1.
        bias: [N], or None for 0.
        eps: added to the variance.

    Returns:
        [..., N] in the dtype of the product.
    """
    dtype = matmul_dtype(x, projection)
    if _together(x, projection, dtype):
        from rebased.ops.norm.linear_gpu import linear_norm

        return linear_norm(x.to(dtype), projection.to(dtype), weight, bias, eps)
    return layer_norm(functional.linear(x, projection), weight, bias, eps)


def _together(x: Tensor, projection: Tensor, dtype: torch.dtype) -> bool:
    """Whether the kernel of linear_gpu.py takes these."""
    if torch.compiler.is_compiling() or not _by_kernel(x) or is_batch_invariant():
        return False
    from rebased.ops.norm.linear_gpu import MAX_FEATURES, MAX_WIDTH

    in_fp32 = dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
    N, D = projection.shape
    return dtype in (torch.float32, torch.bfloat16) and not in_fp32 and D <= MAX_FEATURES and N <= MAX_WIDTH


def _by_kernel(x: Tensor) -> bool:
    """Whether kernels compute this: in forward mode torch would take their derivatives for zero."""
    return kernel_path("auto", x) == "triton" and not in_forward_mode()


def _norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, dtype: torch.dtype, centre: bool, residual: bool
) -> Tensor:
    # torch.compile fuses a norm in plain torch with the operations around it; it cannot fuse a custom kernel.
    if _by_kernel(x) and 1 < x.shape[-1] <= MAX_FEATURES and not torch.compiler.is_compiling():
        from rebased.ops.norm.gpu import norm

        return norm(x, weight, bias, eps, dtype, centre, residual)
    return reference.norm(x, weight, bias, eps, dtype, centre, residual)
