"""Norms in plain torch."""

import torch
from torch import Tensor
from torch.nn import functional

from rebased.ops.backend import accumulate_dtype


def norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, dtype: torch.dtype, centre: bool, residual: bool
) -> Tensor:
    """layer_norm (centre) or rms_norm of x [..., D] in `dtype`; weight and bias [D] or None. residual: plus x."""
    wide = accumulate_dtype(x.dtype)
    weight, bias = (None if each is None else each.to(wide) for each in (weight, bias))
    if centre:
        y = functional.layer_norm(x.to(wide), x.shape[-1:], weight, bias, eps)
    else:
        y = functional.rms_norm(x.to(wide), x.shape[-1:], weight, eps)
    return (x + y if residual else y).to(dtype)
