"""The public function of the token shift: it checks its inputs and chooses a path."""

import torch
from torch import Tensor

from rebased.ops.backend import Backend, kernel_path


def token_shift(x: Tensor, last: Tensor, mixes: Tensor, *, backend: Backend = "auto") -> tuple[Tensor, ...]:
    """Mixtures of each token with the one before it: y_t = x_{t-1} + mix (x_t - x_{t-1}), one y for each row of mixes.

    Args:
        x: [B, T, D], any float dtype; B and T may be 0. Half precision is computed in fp32.
        last: [B, D], the token before the first one; zeros if there is none.
        mixes: [M, D], the share of the present token in each channel of M mixtures, usually between 0 and 1.
        backend: "triton" needs a GPU. All others take the same path in plain torch.

    Returns:
        M tensors [B, T, D] in the dtype of x, differentiable in x, last and mixes (once, if the backend is "triton").
    """
    if x.ndim != 3 or last.shape != (x.shape[0], x.shape[2]) or mixes.ndim != 2 or mixes.shape[1] != x.shape[2]:
        raise ValueError(
            "x must be [B,T,D], last [B,D] and mixes [M,D]; "
            f"they are {list(x.shape)}, {list(last.shape)} and {list(mixes.shape)}"
        )
    if kernel_path(backend, x, offset=x.shape[1] * x.shape[2]) == "triton":
        from rebased.ops.shift.gpu import mix

        return mix(x, last, mixes)
    before = torch.cat([last.unsqueeze(1).to(x.dtype), x[:, :-1]], dim=1)
    return tuple(torch.lerp(before, x, each) for each in mixes.to(x.dtype).unbind())
