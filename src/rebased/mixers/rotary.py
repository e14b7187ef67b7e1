"""Rotary positions: pairs of features of q and k are rotated by angles that grow with the position."""

import torch
from torch import Tensor

ROTARY_BASE = 10_000.0


def rotary_angles(length: int, width: int, device: torch.device) -> Tensor:
    """Return the rotary angles of each position, [length, width/2] in fp64.

    In fp32 they would be wrong by 4e-3 radians at position 65,536.
    """
    rates = ROTARY_BASE ** (-torch.arange(0, width, 2, device=device, dtype=torch.float64) / width)
    return torch.arange(length, device=device, dtype=torch.float64).unsqueeze(1) * rates


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Return x [B,T,H,W] with each pair (x_i, x_{i+W/2}) rotated by the angle of its position, angles [T,W/2]; or x
    [B,H,S,W] by the angle of its row and column, angles [B,S,W/2]."""
    cos, sin = (f(angles).to(x.dtype).unsqueeze(1) for f in (torch.cos, torch.sin))
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, left * sin + right * cos], dim=-1)
