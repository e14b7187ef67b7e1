"""The state of WKV: numerator and denominator of the average, scaled so that a float can hold them.

Both span more than a float can hold, so they are scaled by e^-m with m the largest exponent so far. The result does not
depend on the choice of m, so m needs no gradient.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from rebased.ops.backend import accumulate_dtype

NOTHING = -1e38
"""The largest exponent before the first token: finite, so that the difference of two is never NaN."""


class WKVState(NamedTuple):
    """The sums over the past after t tokens, [B, D] each, fp32 (fp64 for fp64 inputs)."""

    num: Tensor  # e^-max sum_i e^{k_i - (t-i) r} v_i
    den: Tensor  # the same without v_i
    max: Tensor  # the largest exponent


def init_wkv_state(
    batch: int, width: int, *, device: torch.device | None = None, dtype: torch.dtype = torch.float32
) -> WKVState:
    """The state before the first token.

    Args:
        batch: B.
        width: D, the number of channels.
        device: of the state; None means torch's default.
        dtype: of the inputs. The state is fp32, or fp64 for fp64 inputs.

    Returns:
        A WKVState of three tensors [batch, width].
    """
    zeros = torch.zeros(batch, width, device=device, dtype=accumulate_dtype(dtype))
    return WKVState(zeros, zeros, torch.full_like(zeros, NOTHING))
