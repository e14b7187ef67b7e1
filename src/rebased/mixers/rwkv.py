"""RWKV, version 4: time mixing alone. Each token is mixed with the one before it, then averaged over the past."""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from rebased.mixers.contract import register_mixer
from rebased.ops import Backend, WKVState, init_wkv_state, wkv_extend


class RWKVState(NamedTuple):
    last: Tensor  # [B, D]  the token before, for the shift
    wkv: WKVState  # three of [B, D], fp32 (fp64 for fp64)


@register_mixer("rwkv")
class RWKV(nn.Module):
    """out = Wo(sigmoid(r) * wkv(k, v)), with r, k, v projected from mixtures of x_t and x_{t-1}. No biases."""

    def __init__(self, d_model: int, layer: int, n_layers: int, *, backend: Backend = "auto") -> None:
        super().__init__()
        if not 0 <= layer < n_layers:
            raise ValueError(f"layer {layer} is not one of {n_layers} layers; count from 0 to {n_layers - 1}")
        self.depth, self.backend = (layer, n_layers), backend
        self.mix_k = nn.Parameter(torch.empty(d_model))
        self.mix_v = nn.Parameter(torch.empty(d_model))
        self.mix_r = nn.Parameter(torch.empty(d_model))
        self.decay = nn.Parameter(torch.empty(d_model))  # w: the past fades by e^-(e^w) a token
        self.bonus = nn.Parameter(torch.empty(d_model))  # u: the present token's advantage
        self.proj_k = nn.Linear(d_model, d_model, bias=False)
        self.proj_v = nn.Linear(d_model, d_model, bias=False)
        self.proj_r = nn.Linear(d_model, d_model, bias=False)
        self.proj_o = nn.Linear(d_model, d_model, bias=False)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Rates and mixtures spread over the channels, further apart the deeper the layer, as RWKV-4 starts them."""
        layer, n_layers = self.depth
        rho0, rho1 = layer / max(n_layers - 1, 1), 1 - layer / n_layers
        D = len(self.decay)
        h = torch.arange(D, dtype=self.decay.dtype, device=self.decay.device)
        self.decay.copy_(-5 + 8 * (h / max(D - 1, 1)) ** (0.7 + 1.3 * rho0))
        self.bonus.copy_(math.log(0.3) + 0.5 * ((h + 1) % 3 - 1))
        self.mix_k.copy_((h / D) ** rho1)
        self.mix_v.copy_((h / D) ** rho1 + 0.3 * rho0)
        self.mix_r.copy_((h / D) ** (0.5 * rho1))

    def forward(self, x: Tensor) -> Tensor:
        return self.extend(x, self.init_state(x.shape[0], device=x.device, dtype=x.dtype))[0]

    def init_state(
        self, batch: int, *, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> RWKVState:
        D, device, dtype = len(self.decay), device or self.decay.device, dtype or self.decay.dtype
        return RWKVState(
            torch.zeros(batch, D, device=device, dtype=dtype), init_wkv_state(batch, D, device=device, dtype=dtype)
        )

    def extend(self, x: Tensor, state: RWKVState) -> tuple[Tensor, RWKVState]:
        if not isinstance(state, RWKVState):
            raise ValueError(f"the state must be an RWKVState (init_state makes one); got {type(state).__name__}")
        if state.last.shape != x[:, 0].shape:
            raise ValueError(
                f"this state is of another shape: {list(state.last.shape)}; x {list(x.shape)} needs "
                f"{[x.shape[0], x.shape[2]]}"
            )
        before = torch.cat([state.last.unsqueeze(1).to(x.dtype), x[:, :-1]], dim=1)
        k = self.proj_k(torch.lerp(before, x, self.mix_k.to(x.dtype)))
        v = self.proj_v(torch.lerp(before, x, self.mix_v.to(x.dtype)))
        r = torch.sigmoid(self.proj_r(torch.lerp(before, x, self.mix_r.to(x.dtype))))
        o, after = wkv_extend(k, v, self.decay, self.bonus, state.wkv, backend=self.backend)
        return self.proj_o(r * o), RWKVState(x[:, -1], after)

    def state_size(self, seq_len: int) -> int:
        return 4 * len(self.decay)
