"""Hyena of order 2: a convolution as long as the sequence, between two gates. A small MLP computes its filter."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from rebased.mixers.checks import check_input, check_state, empty_output
from rebased.mixers.contract import named_arguments, register_mixer
from rebased.mixers.slots import grown
from rebased.ops import Backend, long_conv, long_conv_extend, short_conv_extend

FAST, SLOW, TARGET = 0.3, 1.5, 0.01  # the fastest and the slowest channel decay to TARGET at these shares of max_len
BAND = 1e-4  # the one frequency of the positional features; with a single band Hyena's own code has it near zero


class HyenaState(NamedTuple):
    """The state of Hyena, in the dtype of x. It grows with the sequence."""

    conv: Tensor  # [B, width - 1, 3D]  the last inputs of the short convolution
    past: Tensor  # [B, t, D]  all inputs of the long convolution so far


class HyenaFilter(nn.Module):
    """The taps of a long filter: an MLP of the position with sine activations, times one decay per channel."""

    layers: Sequence[nn.Linear]

    def __init__(
        self,
        d_model: int,
        max_len: int,
        hidden: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.d_model, self.max_len = d_model, max_len
        self.layers = nn.ModuleList(  # type: ignore[assignment]
            nn.Linear(width, hidden, device=device, dtype=dtype) for width in (3, hidden, hidden)
        )
        self.out = nn.Linear(hidden, d_model, bias=False, device=device, dtype=dtype)
        # One frequency per hidden unit, shared by all layers.
        self.omega = nn.Parameter(torch.ones(hidden, device=device, dtype=dtype))

    def forward(self, T: int) -> Tensor:
        """Return the first T taps, [T,D] in fp32 (fp64 for fp64 weights).

        Half precision would be too coarse: neighbouring positions would be equal.
        """
        weight = self.out.weight
        dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
        steps = torch.arange(T, device=weight.device, dtype=dtype).unsqueeze(-1)
        t = steps / max(self.max_len - 1, 1)  # from 0 to 1 over max_len
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
    """Hyena of order 2: y = out_proj(x2 * (filter * z + skip z)), z = v x1; x1, x2, v = short_conv(in_proj(x)).

    Maps x [B,T,D] to [B,T,D] and never looks ahead. Time is T log T (by FFT). Its state grows with the sequence:
    a filter as long as the past needs all of it.

    Args:
        d_model: width D of x.
        max_len: the longest sequence the filter is built for; longer ones are an error. A model fills it in.
        width: number of taps of the short convolution, 1 to 64. Default 3, Hyena's.
        filter_hidden: hidden width of the MLP that computes the filter. Default 64.
        backend: "auto" (default): Triton kernels for the short convolution on a GPU, plain torch elsewhere. The other
            values of rebased.ops.Backend choose one.
        device, dtype: where and in which dtype weights are made, as in torch.nn.Linear.

    torch.func (vmap, grad, ...) does not work: the backward pass of the short convolution is written by hand.

    Example:
        >>> layer = Hyena(d_model=768, max_len=1024)
        >>> y = layer(torch.randn(2, 1024, 768))                             # [2, 1024, 768]
        >>> y, state = layer.extend(torch.randn(2, 1000, 768), layer.init_state(batch=2))
    """

    residual_projections: tuple[str, ...] = ("out_proj",)
    built_in = ("conv_width", "output_gate")
    spreads_nan = "an FFT mixes all tokens of a row, and separates them again only while all are finite"

    def __init__(
        self,
        d_model: int,
        max_len: int,
        *,
        width: int = 3,
        filter_hidden: int = 64,
        backend: Backend = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not 1 <= width <= 64:
            raise ValueError(f"width {width} of the short convolution is out of range; choose 1 to 64 (Hyena's is 3)")
        if max_len < 1 or filter_hidden < 1:
            raise ValueError(f"max_len {max_len} and filter_hidden {filter_hidden} must be at least 1")
        self.d_model, self.max_len, self.width = d_model, max_len, width
        self.filter_hidden, self.backend = filter_hidden, backend
        wide = 3 * d_model
        self.in_proj = nn.Linear(d_model, wide, device=device, dtype=dtype)
        # It holds the taps; short_conv_extend applies them.
        self.conv = nn.Conv1d(wide, wide, width, groups=wide, device=device, dtype=dtype)
        self.filter = HyenaFilter(d_model, max_len, filter_hidden, device=device, dtype=dtype)
        self.skip = nn.Parameter(torch.randn(d_model, device=device, dtype=dtype))
        self.out_proj = nn.Linear(d_model, d_model, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Return the gated long convolution over time: x [B,T,D] -> [B,T,D], T at most max_len."""
        check_input(self, x, self.in_proj.weight)
        if x.numel() == 0:
            return empty_output(self, x)
        state = self.init_state(x.shape[0], device=x.device, dtype=x.dtype)
        x2, z, _ = self._gates(x, state)
        return self.out_proj(long_conv(z, self._taps(x.shape[1]), self.skip, backend=self.backend) * x2)

    def init_state(
        self, batch: int, *, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> HyenaState:
        """Return the state before the first token: conv, zeros [B, width - 1, 3D], and past [B,0,D]."""
        weight = self.conv.weight
        device, dtype = device or weight.device, dtype or weight.dtype
        return HyenaState(
            conv=torch.zeros(batch, self.width - 1, 3 * self.d_model, device=device, dtype=dtype),
            past=torch.empty(batch, 0, self.d_model, device=device, dtype=dtype),
        )

    def extend(self, x: Tensor, state: HyenaState) -> tuple[Tensor, HyenaState]:
        """Return (y [B,T,D], state after x): forward() of tokens x [B,T,D] that follow those the state has seen."""
        check_input(self, x, self.in_proj.weight)
        check_state(state, HyenaState)
        if x.numel() == 0:
            return empty_output(self, x), HyenaState(state.conv, torch.cat([state.past, x], dim=1))
        x2, z, conv = self._gates(x, state)
        taps = self._taps(state.past.shape[1] + x.shape[1])
        y, past = long_conv_extend(z, taps, self.skip, state.past, backend=self.backend)
        return self.out_proj(y * x2), HyenaState(conv, past)

    def init_slots(self, count: int, capacity: int) -> "HyenaSlots":
        """Return empty states for `count` sequences of at most `capacity` tokens, for decoding (mixers/slots.py)."""
        conv, past = self.init_state(count)
        return HyenaSlots(self, conv, grown(past, min(capacity, self.max_len), 1))

    def state_size(self, seq_len: int) -> int:
        """Return how many numbers the state of one sequence holds: 3 (width - 1) D + seq_len D."""
        return (self.width - 1) * 3 * self.d_model + seq_len * self.d_model

    def extra_repr(self) -> str:
        return named_arguments(self)

    def _gates(self, x: Tensor, state: HyenaState) -> tuple[Tensor, Tensor, Tensor]:
        """Return the outer gate x2 [B,T,D], the gated input z = v x1 [B,T,D] and the next state.conv."""
        taps, bias = self.conv.weight.squeeze(1), self.conv.bias
        u, conv = short_conv_extend(self.in_proj(x), taps, bias, state.conv, backend=self.backend)
        x1, x2, v = u.chunk(3, dim=-1)
        return x2, v * x1, conv

    def _taps(self, T: int) -> Tensor:
        """Return the first T taps of the filter, [T,D]; an error if there are fewer."""
        if self.max_len < T:
            raise ValueError(
                f"{T} tokens are more than the {self.max_len} that Hyena's filter was built for; "
                f"build it with max_len >= {T}"
            )
        return self.filter(T)


class HyenaSlots:
    """States of Hyena for sequences of different lengths: conv [count, width - 1, 3D] and past [count,capacity,D].

    The taps are computed once: weights must not change while there are slots.
    """

    grows = True

    def __init__(self, mixer: Hyena, conv: Tensor, past: Tensor) -> None:
        self._mixer, self.conv, self.past = mixer, conv, past
        self._rows = torch.arange(len(past), device=past.device)
        self._taps = mixer.filter(mixer.max_len).detach()  # [max_len,D]

    def put(self, slot: int, state: HyenaState, length: int) -> None:
        """Copy the state of one sequence into a slot."""
        self.conv[slot].copy_(state.conv[0])
        self.past[slot, :length].copy_(state.past[0])

    def get(self, slot: int, length: int) -> HyenaState:
        """Return a copy of the state in a slot."""
        return HyenaState(self.conv[slot : slot + 1].clone(), self.past[slot : slot + 1, :length].clone())

    def step(self, x: Tensor, lengths: Tensor, longest: int) -> Tensor:
        """Return y [count,1,D] of one more token per slot, and overwrite the states."""
        x2, z, conv = self._mixer._gates(x, HyenaState(self.conv, self.past))
        self.conv.copy_(conv)
        self.past[self._rows, lengths] = z[:, 0].to(self.past.dtype)
        ago = lengths.unsqueeze(1) - torch.arange(longest, device=x.device)  # [count,longest]; below 0: not yet
        taps = self._taps[ago.clamp(min=0)] * (ago >= 0).unsqueeze(2)  # [count,longest,D]
        y = (self.past[:, :longest].to(taps.dtype) * taps).sum(1, keepdim=True)
        y = (y + z.to(taps.dtype) * self._mixer.skip.to(taps.dtype)).to(x.dtype)
        return self._mixer.out_proj(y * x2)

    def reserve(self, capacity: int) -> None:
        """Make room for sequences of `capacity` tokens, as far as the filter goes."""
        capacity = min(capacity, self._mixer.max_len)
        if capacity > self.past.shape[1]:
            self.past = grown(self.past, capacity, 1)

    def tensors(self) -> list[Tensor]:
        """Return the states."""
        return [self.conv, self.past]
