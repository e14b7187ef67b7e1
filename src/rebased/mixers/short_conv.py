"""The gated short convolution: the first layer of the paper's hybrid models."""

import torch
from torch import Tensor, nn

from rebased.mixers.checks import check_input, is_plain
from rebased.mixers.contract import named_arguments, register_mixer
from rebased.mixers.documents import follow_states, space_documents
from rebased.mixers.slots import FixedSlots
from rebased.ops import Norm, gated_conv_step_, short_conv, short_conv_extend


@register_mixer("short_conv")
class ShortConv(nn.Module):
    """Gated short convolution with a skip: y = conv(x) * (P x + b) + x, conv depth-wise and causal with a few taps.

    Maps x [B,T,D] to [B,T,D] and never looks ahead: a token sees itself and the width - 1 tokens before it.

    Args:
        d_model: width D of x.
        width: number of taps, at least 1. Default 3.
        device, dtype: where and in which dtype weights are made, as in torch.nn.Linear.

    torch.func (vmap, grad, ...) does not work: the backward pass of the convolution is written by hand. torch.compile
    works with fullgraph=True.

    Example:
        >>> layer = ShortConv(d_model=768)
        >>> y = layer(torch.randn(2, 1024, 768))                             # [2, 1024, 768]
        >>> y, state = layer.extend(torch.randn(2, 1000, 768), layer.init_state(batch=2))
    """

    residual_projections: tuple[str, ...] = ()
    built_in = ("conv_width", "output_gate")

    def __init__(
        self,
        d_model: int,
        *,
        width: int = 3,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if width < 1:
            raise ValueError(f"width {width} of the short convolution must be at least 1")
        self.d_model, self.width = d_model, width
        self.projection = nn.Linear(d_model, d_model, device=device, dtype=dtype)
        # It holds the taps; short_conv applies them.
        self.conv = nn.Conv1d(d_model, d_model, width, groups=d_model, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Return the gated convolution over time: x [B,T,D] -> [B,T,D].

        x has the dtype and device of the weights; under autocast any floating dtype. B and T may be 0.
        """
        self._check(x)
        return self._gate(short_conv(x, self.conv.weight.squeeze(1), self.conv.bias), x)

    def forward_documents(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Return forward() of each packed document by itself: x [B,T,D], cu_seqlens [n+1] -> [B,T,D]."""
        self._check(x)
        spaced, places = space_documents(x, cu_seqlens, gap=self.width - 1)
        y = short_conv(spaced, self.conv.weight.squeeze(1), self.conv.bias).index_select(1, places)
        return self._gate(y.view_as(x), x)

    def init_state(self, batch: int, *, device: torch.device | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """Return the state before the first token, the last width - 1 inputs: zeros [B, width - 1, D]."""
        weight = self.conv.weight
        shape = (batch, self.width - 1, self.d_model)
        return torch.zeros(shape, device=device or weight.device, dtype=dtype or weight.dtype)

    def extend(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return (y [B,T,D], state after x): forward() of tokens x [B,T,D] that follow those the state has seen."""
        self._check(x)
        y, state = short_conv_extend(x, self.conv.weight.squeeze(1), self.conv.bias, state)
        return self._gate(y, x), state

    def extend_documents(self, x: Tensor, cu_seqlens: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return (y [1,N,D], state after x): extend() of each packed document by itself (mixers/documents.py)."""
        self._check(x)
        seen, places, after = follow_states(x, cu_seqlens, state)
        y = short_conv(seen, self.conv.weight.squeeze(1), self.conv.bias).index_select(1, places)
        return self._gate(y, x), after

    @property
    def slots_class(self) -> type[FixedSlots]:
        """Slots with fused steps; plain slots if a subclass or a hook changes the mixer (mixers/slots.py)."""
        return ShortConvSlots if type(self) is ShortConv and is_plain(nn.Linear, self.projection) else FixedSlots

    def state_size(self, seq_len: int) -> int:
        """Return how many numbers the state of one sequence holds: (width - 1) D, whatever seq_len is."""
        return (self.width - 1) * self.d_model

    def extra_repr(self) -> str:
        return named_arguments(self)

    def _check(self, x: Tensor) -> None:
        check_input(self, x, self.projection.weight)

    def _gate(self, y: Tensor, x: Tensor) -> Tensor:
        return torch.addcmul(x, y, self.projection(x))  # one pass over memory, not two


class ShortConvSlots(FixedSlots):
    """Slots whose step is one kernel with the norm before the mixer and the residual."""

    def step_fused(self, x: Tensor, norm: Norm, lengths: Tensor, longest: int) -> Tensor:
        """Return x + mixer(norm(x)) [count,D] of one more token x [count,D] per slot, and overwrite the states."""
        gate, conv = self._mixer.projection, self._mixer.conv
        return gated_conv_step_(x, norm, gate.weight, gate.bias, conv.weight.squeeze(1), conv.bias, self._state)
