"""The previous token added to each token: a fixed convolution without weights, the first layer of the paper's probe."""

import torch
from torch import Tensor, nn

from rebased.mixers.checks import check_input
from rebased.mixers.contract import named_arguments, register_mixer
from rebased.mixers.documents import space_documents


@register_mixer("previous_token")
class PreviousToken(nn.Module):
    """y_t = x_{t-1} + x_t: the short convolution with fixed taps (0, 1, 0) and a gate fixed at 1. It learns nothing.

    Maps x [B,T,D] to [B,T,D]. A value then holds its key, so the layer above has to attend to the value's position, and
    its attention matrix can be compared with that position (the paper's Section 5.5).

    Args:
        d_model: width D of x.
        device, dtype: of the x that it takes, as in torch.nn.Linear.

    torch.func (vmap, grad, ...) works. torch.compile works with fullgraph=True.

    Example:
        >>> layer = PreviousToken(d_model=64)
        >>> y = layer(torch.randn(2, 128, 64))                               # [2, 128, 64]
    """

    residual_projections: tuple[str, ...] = ()

    gate: Tensor

    def __init__(
        self, d_model: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.d_model = d_model
        gate = torch.ones(1, d_model, device=device, dtype=dtype)
        self.register_buffer("gate", gate)  # saved too: whoever loads a model need not build it first

    def forward(self, x: Tensor) -> Tensor:
        """Return each token plus the one before it: x [B,T,D] -> [B,T,D]. B and T may be 0."""
        check_input(self, x, self.gate)
        return self.extend(x, self.init_state(len(x), device=x.device, dtype=x.dtype))[0]

    def forward_documents(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Return forward() of each packed document by itself: x [B,T,D], cu_seqlens [n+1] -> [B,T,D]."""
        spaced, places = space_documents(x, cu_seqlens, gap=1)
        return self.forward(spaced).index_select(1, places).view_as(x)

    def init_state(self, batch: int, *, device: torch.device | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """Return the state before the first token, the last token seen: zeros [B,1,D]."""
        shape = (batch, 1, self.d_model)
        return torch.zeros(shape, device=device or self.gate.device, dtype=dtype or self.gate.dtype)

    def extend(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return (y [B,T,D], state after x): forward() of tokens x [B,T,D] that follow those the state has seen."""
        check_input(self, x, self.gate)
        seen = torch.cat([state.to(x.dtype), x], dim=1)
        return torch.addcmul(x, seen[:, :-1], self.gate.to(x.dtype)), seen[:, -1:]

    def state_size(self, seq_len: int) -> int:
        """Return how many numbers the state of one sequence holds: D, whatever seq_len is."""
        return self.d_model

    def extra_repr(self) -> str:
        return named_arguments(self)
