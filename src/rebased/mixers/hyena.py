"""Hyena of order 2: a convolution as long as the sequence between two gates, its filter the output of a small MLP."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from rebased.mixers.contract import register_mixer
from rebased.ops import Backend, long_conv, long_conv_extend, short_conv_extend

FAST, SLOW, TARGET = 0.3, 1.5, 0.01  # the fastest and the slowest channel fall to TARGET at these shares of max_len
BAND = 1e-4  # the one frequency of the positional features: with a single band Hyena's code leaves it near zero


class HyenaState(NamedTuple):
    conv: Tensor  # [B, width - 1, 3D]  the last inputs of the short convolution
    past: Tensor  # [B, t, D]  every input of the long convolution so far: this state grows


class HyenaFilter(nn.Module):
    """The taps [T,D] of a long filter: an MLP with sines over the position, times a decay of each channel's own."""

    layers: Sequence[nn.Linear]

    def __init__(self, d_model: int, max_len: int, hidden: int) -> None:
        super().__init__()
        self.d_model, self.max_len = d_model, max_len
        self.layers = nn.ModuleList(nn.Linear(width, hidden) for width in (3, hidden, hidden))  # type: ignore[assignment]
        self.out = nn.Linear(hidden, d_model, bias=False)
        self.omega = nn.Parameter(torch.ones(hidden))  # one frequency a unit, shared by all layers

    def forward(self, T: int) -> Tensor:
        """In fp32 (fp64 for fp64) whatever the weights: half precision cannot tell one position from the next."""
        weight = self.out.weight
        dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
        steps = torch.arange(T, device=weight.device, dtype=dtype).unsqueeze(-1)
        t = steps / max(self.max_len - 1, 1)  # 0 .. 1 over the length the filter was built for
        angle = BAND * 2 * math.pi / self.max_len * steps
        h = torch.cat([t, torch.cos(angle), -torch.sin(angle)], dim=-1)  # [T,3]
        with torch.autocast(weight.device.type, enabled=False):
            for layer in self.layers:
                h = functional.linear(h, layer.weight.to(dtype), layer.bias.to(dtype))
                h = torch.sin(self.omega.to(dtype) * h)
            h = functional.linear(h, weight.to(dtype))
        rates = torch.linspace(
            -math.log(TARGET) / SLOW, -math.log(TARGET) / FAST, self.d_model, device=h.device, dtype=dtype
        )
        return h * torch.exp(-t * rates)


@register_mixer("hyena")
class Hyena(nn.Module):
    """y = out_proj(x2 * (filter * (v x1) + d (v x1))), with x1, x2, v from one projection and a short convolution."""

    def __init__(
        self, d_model: int, max_len: int, *, width: int = 3, filter_hidden: int = 64, backend: Backend = "auto"
    ) -> None:
        super().__init__()
        if not 1 <= width <= 64:
            raise ValueError(f"width {width} of the short convolution is out of range; choose 1 to 64 (Hyena's is 3)")
        if max_len < 1 or filter_hidden < 1:
            raise ValueError(f"max_len {max_len} and filter_hidden {filter_hidden} must be at least 1")
        self.backend = backend
        self.in_proj = nn.Linear(d_model, 3 * d_model)
        self.conv = nn.Conv1d(3 * d_model, 3 * d_model, width, groups=3 * d_model)  # holds the taps
        self.filter = HyenaFilter(d_model, max_len, filter_hidden)
        self.skip = nn.Parameter(torch.randn(d_model))
        self.out_proj = nn.Linear(d_model, d_model)

    def forward(self, x: Tensor) -> Tensor:
        state = self.init_state(x.shape[0], device=x.device, dtype=x.dtype)
        x2, z, _ = self._gates(x, state)
        return self.out_proj(long_conv(z, self._taps(x.shape[1]), self.skip, backend=self.backend) * x2)

    def init_state(
        self, batch: int, *, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> HyenaState:
        weight = self.conv.weight
        device, dtype = device or weight.device, dtype or weight.dtype
        width, D = weight.shape[2], len(self.skip)
        return HyenaState(
            conv=torch.zeros(batch, width - 1, 3 * D, device=device, dtype=dtype),
            past=torch.empty(batch, 0, D, device=device, dtype=dtype),
        )

    def extend(self, x: Tensor, state: HyenaState) -> tuple[Tensor, HyenaState]:
        if not isinstance(state, HyenaState):
            raise ValueError(f"the state must be a HyenaState (init_state makes one); got {type(state).__name__}")
        x2, z, conv = self._gates(x, state)
        taps = self._taps(state.past.shape[1] + x.shape[1])
        y, past = long_conv_extend(z, taps, self.skip, state.past, backend=self.backend)
        return self.out_proj(y * x2), HyenaState(conv, past)

    def state_size(self, seq_len: int) -> int:
        """Grows with the sequence: a filter as long as the past needs all of it."""
        return (self.conv.weight.shape[2] - 1) * 3 * len(self.skip) + seq_len * len(self.skip)

    def _gates(self, x: Tensor, state: HyenaState) -> tuple[Tensor, Tensor, Tensor]:
        taps, bias = self.conv.weight.squeeze(1), self.conv.bias
        u, conv = short_conv_extend(self.in_proj(x), taps, bias, state.conv, backend=self.backend)
        x1, x2, v = u.chunk(3, dim=-1)
        return x2, v * x1, conv

    def _taps(self, T: int) -> Tensor:
        if self.filter.max_len < T:
            raise ValueError(
                f"{T} tokens are more than the {self.filter.max_len} that Hyena's filter was built for; "
                f"build it with max_len >= {T}"
            )
        return self.filter(T)
