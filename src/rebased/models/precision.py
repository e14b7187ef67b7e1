"""In which dtype the layers of a model multiply."""

from contextlib import AbstractContextManager

import torch


def autocast(dtype: torch.dtype | None, device: torch.device) -> AbstractContextManager[None]:
    """Inside, products of layers are in `dtype`; weights, norms, sums and the residual stream keep theirs.

    None: that of the weights. Each weight is cast once per forward pass, so a cache of casts would only hold memory.
    """
    return torch.autocast(device.type, dtype, enabled=dtype is not None, cache_enabled=False)
