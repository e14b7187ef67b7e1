"""Mamba (S6): a gated state space model whose step size and projections depend on the token."""

import math
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from rebased.mixers.contract import register_mixer
from rebased.mixers.documents import space_documents
from rebased.ops import Backend, selective_scan, selective_scan_extend, short_conv, short_conv_extend

DtInit = Literal["mamba", "paper"]
"""How the step size dt starts: as Mamba's authors do it, or as in the paper's runs, whose init hook zeroed the bias."""

DT_RANGE, DT_FLOOR = (1e-3, 1e-1), 1e-4
FORGET = 1e10  # a step so long that nothing is left of the state after it, in any dtype


class MambaState(NamedTuple):
    conv: Tensor  # [B, d_conv - 1, E]  the last inputs of the short convolution
    ssm: Tensor  # [B, E, d_state], fp32 (fp64 for fp64)


@register_mixer("mamba")
class Mamba(nn.Module):
    """Widen to E = expand * D, convolve, scan, gate, project back. Every weight is named as in Mamba's own code."""

    def __init__(
        self,
        d_model: int,
        *,
        d_state: int = 16,
        d_conv: int = 4,
        expand: int = 2,
        dt_init: DtInit = "mamba",
        backend: Backend = "auto",
    ) -> None:
        super().__init__()
        if not 1 <= d_state <= 256:
            raise ValueError(f"d_state {d_state} is out of range; choose 1 to 256 (Mamba's is 16)")
        if not 1 <= d_conv <= 64:
            raise ValueError(f"d_conv {d_conv} is out of range; choose 1 to 64 taps (Mamba's is 4)")
        if expand < 1:
            raise ValueError(f"expand {expand} must be at least 1 (Mamba's is 2)")
        if dt_init not in get_args(DtInit):
            raise ValueError(f"dt_init {dt_init!r} is unknown; choose 'mamba' or 'paper' (its dt bias is zero)")
        self.d_state, self.dt_rank, self.dt_init, self.backend = d_state, math.ceil(d_model / 16), dt_init, backend
        E = expand * d_model
        self.in_proj = nn.Linear(d_model, 2 * E, bias=False)
        self.conv1d = nn.Conv1d(E, E, d_conv, groups=E)  # holds the taps; short_conv applies them
        self.x_proj = nn.Linear(E, self.dt_rank + 2 * d_state, bias=False)
        self.dt_proj = nn.Linear(self.dt_rank, E)
        self.A_log = nn.Parameter(torch.arange(1, d_state + 1.0).log().repeat(E, 1))  # [E,N]
        self.D = nn.Parameter(torch.ones(E))
        self.out_proj = nn.Linear(E, d_model, bias=False)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Only dt is particular. Mamba's own start lets channels remember for 10 to 1,000 tokens; a bias of zero,
        softplus(0) = 0.7, makes all of them forget within a few."""
        if self.dt_init == "paper":
            nn.init.normal_(self.dt_proj.weight, std=0.02)
            nn.init.zeros_(self.dt_proj.bias)
            return
        nn.init.uniform_(self.dt_proj.weight, -(self.dt_rank**-0.5), self.dt_rank**-0.5)
        low, high = (math.log(bound) for bound in DT_RANGE)
        dt = torch.empty_like(self.dt_proj.bias).uniform_(low, high).exp().clamp(min=DT_FLOOR)
        self.dt_proj.bias.copy_(dt + torch.log(-torch.expm1(-dt)))  # the inverse of softplus

    def forward(self, x: Tensor) -> Tensor:
        return self.extend(x, self.init_state(x.shape[0], device=x.device, dtype=x.dtype))[0]

    def forward_documents(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Documents with a gap between them: it gives the convolution zeros to look at and the scan time to forget."""
        u, gate = self.in_proj(x).chunk(2, dim=-1)
        taps = self.conv1d.weight.squeeze(1)
        u, places = space_documents(u, cu_seqlens, gap=max(1, taps.shape[1] - 1))
        u = functional.silu(short_conv(u, taps, self.conv1d.bias, backend=self.backend))
        between = torch.ones(u.shape[1], 1, dtype=torch.bool, device=u.device).index_fill(0, places, False)
        u = u.masked_fill(between, 0)
        dt, B, C = self._select(u)
        dt = dt.masked_fill(between, min(FORGET, torch.finfo(dt.dtype).max))
        y = selective_scan(u, dt, -torch.exp(self.A_log), B, C, self.D, backend=self.backend)
        return self.out_proj(y.index_select(1, places).view_as(gate) * functional.silu(gate))

    def init_state(
        self, batch: int, *, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> MambaState:
        weight = self.conv1d.weight
        E, taps = weight.shape[0], weight.shape[2]
        device, dtype = device or weight.device, dtype or weight.dtype
        sums = torch.float64 if dtype == torch.float64 else torch.float32
        return MambaState(
            conv=torch.zeros(batch, taps - 1, E, device=device, dtype=dtype),
            ssm=torch.zeros(batch, E, self.d_state, device=device, dtype=sums),
        )

    def extend(self, x: Tensor, state: MambaState) -> tuple[Tensor, MambaState]:
        if not isinstance(state, MambaState):
            raise ValueError(f"the state must be a MambaState (init_state makes one); got {type(state).__name__}")
        u, gate = self.in_proj(x).chunk(2, dim=-1)  # [B,T,E] each
        taps = self.conv1d.weight.squeeze(1)
        u, conv = short_conv_extend(u, taps, self.conv1d.bias, state.conv, backend=self.backend)
        u = functional.silu(u)
        dt, B, C = self._select(u)
        y, ssm = selective_scan_extend(u, dt, -torch.exp(self.A_log), B, C, self.D, state.ssm, backend=self.backend)
        return self.out_proj(y * functional.silu(gate)), MambaState(conv, ssm)

    def state_size(self, seq_len: int) -> int:
        E, taps = self.conv1d.weight.shape[0], self.conv1d.weight.shape[2]
        return E * (taps - 1 + self.d_state)

    def _select(self, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The step size dt [B,T,E] and the projections B, C [B,T,N] of each token."""
        dt, B, C = self.x_proj(u).split([self.dt_rank, self.d_state, self.d_state], dim=-1)
        return functional.softplus(self.dt_proj(dt)), B, C
