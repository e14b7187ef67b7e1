"""A way to the kernels of a GPU for coefficients that are learnt: `complete_square`."""

import torch
from torch import Tensor
from torch.nn import functional

from rebased.ops.backend import accumulate_dtype
from rebased.ops.polynomial.state import Coefficients

COMPLETED: Coefficients = (1.0, 0.0, 1.0)
"""The coefficients for queries and keys of `complete_square`."""


def complete_square(q: Tensor, k: Tensor, coefficients: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Queries and keys into which learnt coefficients have gone: c0 + c1 s + c2 s^2 = r (1 + (q' . k')^2).

    With them poly_attention takes the GPU's kernels: call it with coefficients=COMPLETED and scale=1. The factor
    r = c0 - c1^2 / (4 c2) cancels in o; only eps counts r times.

    Args:
        q, k: [B, T, H, K].
        coefficients: tensor [3] with c2 > 0 and r > 0, which holds if every similarity is positive. Else the result is
            NaN.
        scale: factor of q . k in s.

    Returns:
        q', k' [B, T, H, K'] in the dtypes of q and k. K' is K + 2 rounded up to a multiple of 8, because kernels read 8
        columns at once; the last columns are zero.
    """
    c0, c1, c2 = coefficients.double().unbind()
    r = c0 - c1**2 / (4 * c2)
    factor, shift = scale * (c2 / r).sqrt(), c1 / (2 * (c2 * r).sqrt())  # q' . k' = factor q . k + shift
    high = shift.to(q.dtype)
    low = (shift - high.double()).to(q.dtype)  # what half precision has rounded off
    zeros = -(q.shape[3] + 2) % 8
    shifts = functional.pad(torch.stack([high, low]), (0, zeros)).expand(*q.shape[:3], -1)
    ones = functional.pad(k.new_ones(2), (0, zeros)).expand(*k.shape[:3], -1)
    wide = accumulate_dtype(q.dtype)
    scaled = (q.to(wide) * factor.to(wide)).to(q.dtype)
    return torch.cat([scaled, shifts], dim=-1), torch.cat([k, ones], dim=-1)
