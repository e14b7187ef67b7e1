"""The gated short convolution that stands in the first layer of every hybrid."""

import torch
from torch import Tensor, nn

from rebased.mixers.contract import Earlier, register_mixer
from rebased.mixers.documents import space_documents
from rebased.mixers.parts import tokens_before
from rebased.ops import short_conv, short_conv_extend


@register_mixer("short_conv")
class ShortConv(nn.Module):
    """y = conv(u) * (P u + b) + u: a depth-wise causal convolution of a few taps, gated, with a skip."""

    def __init__(self, d_model: int, *, width: int = 3) -> None:
        super().__init__()
        if width < 1:
            raise ValueError(f"width {width} of the short convolution must be at least 1")
        self.projection = nn.Linear(d_model, d_model)
        self.conv = nn.Conv1d(d_model, d_model, width, groups=d_model)  # holds the taps; short_conv applies them

    def forward(self, x: Tensor) -> Tensor:
        return self._gate(short_conv(x, self.conv.weight.squeeze(1), self.conv.bias), x)

    def forward_documents(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        spaced, places = space_documents(x, cu_seqlens, gap=self.conv.weight.shape[2] - 1)
        y = short_conv(spaced, self.conv.weight.squeeze(1), self.conv.bias).index_select(1, places)
        return self._gate(y.view_as(x), x)

    def forward_part(self, x: Tensor, earlier: Earlier) -> Tensor:
        state = self.init_state(x.shape[0], device=x.device, dtype=x.dtype)
        seen = torch.cat([state, tokens_before(x, earlier, count=state.shape[1])], dim=1)
        return self.extend(x, seen[:, seen.shape[1] - state.shape[1] :])[0]

    def init_state(self, batch: int, *, device: torch.device | None = None, dtype: torch.dtype | None = None) -> Tensor:
        weight = self.conv.weight
        taps, d_model = weight.shape[2], weight.shape[0]
        return torch.zeros(batch, taps - 1, d_model, device=device or weight.device, dtype=dtype or weight.dtype)

    def extend(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        y, state = short_conv_extend(x, self.conv.weight.squeeze(1), self.conv.bias, state)
        return self._gate(y, x), state

    def state_size(self, seq_len: int) -> int:
        return (self.conv.weight.shape[2] - 1) * self.conv.weight.shape[0]

    def _gate(self, y: Tensor, x: Tensor) -> Tensor:
        return torch.addcmul(x, y, self.projection(x))  # one pass over memory, not two
