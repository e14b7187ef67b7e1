"""The time mixing of RWKV-4. Each token is mixed with the one before it, then averaged with the past."""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from rebased.mixers.checks import check_input, check_state, empty_output
from rebased.mixers.contract import named_arguments, register_mixer
from rebased.ops import Backend, WKVState, init_wkv_state, token_shift, wkv_extend
from rebased.ops.backend import accumulate_dtype


class RWKVState(NamedTuple):
    """The state of RWKV, of constant size."""

    last: Tensor  # [B, D]  the last token, in the dtype of x
    wkv: WKVState  # three tensors [B, D], fp32 (fp64 for fp64)


@register_mixer("rwkv")
class RWKV(nn.Module):
    """The time mixing of RWKV-4: y = Wo(sigmoid(r) * wkv(k, v)), r, k, v projected from mixtures of x_t and x_{t-1}.

    Maps x [B,T,D] to [B,T,D], never looks ahead, and takes time linear in T. Its state has a constant size. There are
    no biases.

    Args:
        d_model: width D of x.
        layer: number of this layer in the model, from 0. The initial weights depend on it. A model fills it in.
        n_layers: number of layers of the model. A model fills it in.
        backend: "auto" (default): Triton kernels on a GPU, plain torch elsewhere. "triton", "chunked" (torch,
            all tokens at once) and "reference" or "recurrent" (torch, one token after the other) choose one.
        device, dtype: where and in which dtype weights are made, as in torch.nn.Linear.

    torch.func (vmap, grad, ...) works with backend="reference" or "recurrent".

    Example:
        >>> layer = RWKV(d_model=768, layer=0, n_layers=12)
        >>> y = layer(torch.randn(2, 1024, 768))                             # [2, 1024, 768]
        >>> y, state = layer.extend(torch.randn(2, 1000, 768), layer.init_state(batch=2))
    """

    residual_projections: tuple[str, ...] = ()  # proj_o starts at N(0, 0.02) like the others, as in the paper's runs
    built_in = ("output_gate",)

    def __init__(
        self,
        d_model: int,
        layer: int,
        n_layers: int,
        *,
        backend: Backend = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not 0 <= layer < n_layers:
            raise ValueError(f"layer {layer} is not one of {n_layers} layers; count from 0 to {n_layers - 1}")
        self.d_model, self.layer, self.n_layers, self.backend = d_model, layer, n_layers, backend
        self.mix_k = nn.Parameter(torch.empty(d_model, device=device, dtype=dtype))
        self.mix_v = nn.Parameter(torch.empty(d_model, device=device, dtype=dtype))
        self.mix_r = nn.Parameter(torch.empty(d_model, device=device, dtype=dtype))
        self.decay = nn.Parameter(torch.empty(d_model, device=device, dtype=dtype))  # w: e^-(e^w) of the past stays
        self.bonus = nn.Parameter(torch.empty(d_model, device=device, dtype=dtype))  # u: added to the present token's k
        self.proj_k = nn.Linear(d_model, d_model, bias=False, device=device, dtype=dtype)
        self.proj_v = nn.Linear(d_model, d_model, bias=False, device=device, dtype=dtype)
        self.proj_r = nn.Linear(d_model, d_model, bias=False, device=device, dtype=dtype)
        self.proj_o = nn.Linear(d_model, d_model, bias=False, device=device, dtype=dtype)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Set decay, bonus and mixtures as RWKV-4 starts them. They differ by channel, more so in deeper layers."""
        if self.decay.is_meta:  # there is nothing to set, and torch would import its compiler to compute it
            return
        layer, n_layers = self.layer, self.n_layers
        rho0, rho1 = layer / max(n_layers - 1, 1), 1 - layer / n_layers
        D = len(self.decay)
        h = torch.arange(D, dtype=accumulate_dtype(self.decay.dtype), device=self.decay.device)
        self.decay.copy_(-5 + 8 * (h / max(D - 1, 1)) ** (0.7 + 1.3 * rho0))
        self.bonus.copy_(math.log(0.3) + 0.5 * ((h + 1) % 3 - 1))
        self.mix_k.copy_((h / D) ** rho1)
        self.mix_v.copy_((h / D) ** rho1 + 0.3 * rho0)
        self.mix_r.copy_((h / D) ** (0.5 * rho1))

    def forward(self, x: Tensor) -> Tensor:
        """Return the time mixing: x [B,T,D] -> [B,T,D]."""
        check_input(self, x, self.proj_k.weight)
        return self.extend(x, self.init_state(x.shape[0], device=x.device, dtype=x.dtype))[0]

    def init_state(
        self, batch: int, *, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> RWKVState:
        """Return the state before the first token: last [B,D] and wkv, three tensors [B,D]."""
        D, device, dtype = len(self.decay), device or self.decay.device, dtype or self.decay.dtype
        return RWKVState(
            torch.zeros(batch, D, device=device, dtype=dtype), init_wkv_state(batch, D, device=device, dtype=dtype)
        )

    def extend(self, x: Tensor, state: RWKVState) -> tuple[Tensor, RWKVState]:
        """Return (y [B,T,D], state after x): forward() of tokens x [B,T,D] that follow those the state has seen."""
        check_input(self, x, self.proj_k.weight)
        check_state(state, RWKVState)
        if state.last.shape != (x.shape[0], x.shape[2]):
            raise ValueError(
                f"this state is of another shape: {list(state.last.shape)}; x {list(x.shape)} needs "
                f"{[x.shape[0], x.shape[2]]}"
            )
        if x.numel() == 0:
            return empty_output(self, x), state
        mixes = torch.stack([self.mix_k, self.mix_v, self.mix_r])
        for_k, for_v, for_r = token_shift(x, state.last, mixes, backend=self.backend)
        k, v, r = self.proj_k(for_k), self.proj_v(for_v), torch.sigmoid(self.proj_r(for_r))
        o, after = wkv_extend(k, v, self.decay, self.bonus, state.wkv, backend=self.backend)
        return self.proj_o(r * o), RWKVState(x[:, -1], after)

    def state_size(self, seq_len: int) -> int:
        """Return how many numbers the state of one sequence holds: 4 D, whatever seq_len is."""
        return 4 * self.d_model

    def extra_repr(self) -> str:
        return named_arguments(self)
