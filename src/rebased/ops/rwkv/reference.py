"""WKV as the equation says it: a loop over T."""

import torch
from torch import Tensor

from rebased.ops.rwkv.state import WKVState


def scan(k: Tensor, v: Tensor, rate: Tensor, u: Tensor, state: WKVState) -> tuple[Tensor, WKVState]:
    """y [B, T, D] and the state after the last token: k, v [B, T, D], rate and u [D], all in the dtype of the state."""
    num, den, m = state
    outputs = []
    for t in range(k.shape[1]):
        outputs.append(output(num, den, m, k[:, t], v[:, t], u))
        after = torch.maximum(m - rate, k[:, t]).detach()
        old, new = torch.exp((m - after) - rate), torch.exp(k[:, t] - after)
        num, den, m = old * num + new * v[:, t], old * den + new, after
    if not outputs:
        return k * v * rate * u, state  # empty, and still a function of all four to autograd
    return torch.stack(outputs, dim=1), WKVState(num, den, m)


def output(num: Tensor, den: Tensor, m: Tensor, k: Tensor, v: Tensor, u: Tensor) -> Tensor:
    """The average over the past (num, den and m before this token) and this token with its bonus u; all [..., D]."""
    top = torch.maximum(m, u + k).detach()
    past, present = torch.exp(m - top), torch.exp(u + k - top)
    return (past * num + present * v) / (past * den + present)
