"""Mamba (S6): a gated state space model whose step size and projections depend on the token."""

import math
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from rebased.mixers.checks import check_input, check_state, empty_output, is_plain
from rebased.mixers.contract import named_arguments, register_mixer
from rebased.mixers.documents import space_documents
from rebased.mixers.recurrent import draw_time_steps
from rebased.ops import Backend, selective_scan, selective_scan_extend, short_conv, short_conv_extend
from rebased.ops.backend import accumulate_dtype, kernel_path

DtInit = Literal["mamba", "paper"]
"""How the step size dt starts: as in Mamba's own code, or as in the paper's runs, with a dt_proj bias of zero."""

FORGET = 1e10  # a step so long that nothing is left of the state after it, in any dtype


class MambaState(NamedTuple):
    """The state of Mamba, of constant size. E = expand * d_model channels."""

    conv: Tensor  # [B, d_conv - 1, E]  the last inputs of the short convolution, in the dtype of x
    ssm: Tensor  # [B, E, d_state], fp32 (fp64 for fp64)


@register_mixer("mamba")
class Mamba(nn.Module):
    """Mamba: project x to E = expand * D channels, convolve, scan, gate, project back to D.

    Maps x [B,T,D] to [B,T,D], never looks ahead, and takes time linear in T. Its state has a constant size. Weights
    have the names of Mamba's own code.

    Args:
        d_model: width D of x.
        d_state: size N of the state of each channel, 1 to 256. Default 16, Mamba's.
        d_conv: number of taps of the short convolution, 1 to 64. Default 4, Mamba's.
        expand: E / D, at least 1. Default 2, Mamba's.
        dt_init: "mamba" (default): channels start with memories of 10 to 1,000 tokens. "paper": dt_proj starts with
            weights N(0, 0.02) and a bias of zero, and all channels forget within a few tokens.
        backend: "auto" (default): Triton kernels on a GPU, plain torch elsewhere. "triton", "chunked" (torch,
            all tokens at once) and "reference" or "recurrent" (torch, one token after the other) choose one.
        device, dtype: where and in which dtype weights are made, as in torch.nn.Linear.

    torch.func (vmap, grad, ...) does not work: the backward passes of its operators are written by hand.

    Example:
        >>> layer = Mamba(d_model=768)
        >>> y = layer(torch.randn(2, 1024, 768))                             # [2, 1024, 768]
        >>> y, state = layer.extend(torch.randn(2, 1000, 768), layer.init_state(batch=2))
    """

    residual_projections: tuple[str, ...] = ("out_proj",)
    built_in = ("conv_width", "output_gate")

    def __init__(
        self,
        d_model: int,
        *,
        d_state: int = 16,
        d_conv: int = 4,
        expand: int = 2,
        dt_init: DtInit = "mamba",
        backend: Backend = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
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
        self.d_model, self.d_state, self.d_conv, self.expand = d_model, d_state, d_conv, expand
        self.dt_rank, self.dt_init, self.backend = math.ceil(d_model / 16), dt_init, backend
        E = expand * d_model
        self.in_proj = nn.Linear(d_model, 2 * E, bias=False, device=device, dtype=dtype)
        # It holds the taps; short_conv applies them.
        self.conv1d = nn.Conv1d(E, E, d_conv, groups=E, device=device, dtype=dtype)
        self.x_proj = nn.Linear(E, self.dt_rank + 2 * d_state, bias=False, device=device, dtype=dtype)
        self.dt_proj = nn.Linear(self.dt_rank, E, device=device, dtype=dtype)
        A_log = torch.empty(E, d_state, device=device, dtype=dtype)
        if not A_log.is_meta:  # else torch would import its compiler to compute it
            A_log.copy_(torch.arange(1, d_state + 1.0, device=device, dtype=accumulate_dtype(A_log.dtype)).log())
        self.A_log = nn.Parameter(A_log)
        self.D = nn.Parameter(torch.ones(E, device=device, dtype=dtype))
        self.out_proj = nn.Linear(E, d_model, bias=False, device=device, dtype=dtype)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Set the weights of dt_proj as `dt_init` says. The model calls it after its own init.

        Mamba's own start gives channels memories of 10 to 1,000 tokens. A bias of zero gives the step size
        softplus(0) = 0.7, with which all channels forget within a few tokens.
        """
        if self.dt_init == "paper":
            nn.init.normal_(self.dt_proj.weight, std=0.02)
            nn.init.zeros_(self.dt_proj.bias)
            return
        nn.init.uniform_(self.dt_proj.weight, -(self.dt_rank**-0.5), self.dt_rank**-0.5)
        draw_time_steps(self.dt_proj.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the gated scan over time: x [B,T,D] -> [B,T,D]."""
        check_input(self, x, self.in_proj.weight)
        return self.extend(x, self.init_state(x.shape[0], device=x.device, dtype=x.dtype))[0]

    def forward_documents(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Return forward() of each packed document by itself: x [B,T,D], cu_seqlens [n+1] -> [B,T,D].

        A gap follows each document. There the convolution sees zeros, and a very long step clears the scan's state.
        """
        check_input(self, x, self.in_proj.weight)
        u, gate = self.in_proj(x).chunk(2, dim=-1)  # [B,T,E] each
        taps = self.conv1d.weight.squeeze(1)
        u, places = space_documents(u, cu_seqlens, gap=max(1, taps.shape[1] - 1))
        u = short_conv(u, taps, self.conv1d.bias, activation="silu", backend=self.backend)
        between = torch.ones(u.shape[1], 1, dtype=torch.bool, device=u.device).index_fill(0, places, False)
        u = u.masked_fill(between, 0)
        low_rank, B, C = self._split(u)
        dt = functional.softplus(self.dt_proj(low_rank))
        dt = dt.masked_fill(between, min(FORGET, torch.finfo(dt.dtype).max))
        y = selective_scan(u, dt, -torch.exp(self.A_log), B, C, self.D, backend=self.backend)
        return self.out_proj(y.index_select(1, places).view_as(gate) * functional.silu(gate))

    def init_state(
        self, batch: int, *, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> MambaState:
        """Return the state before the first token: conv [B, d_conv - 1, E] and ssm [B, E, d_state], all zeros."""
        weight = self.conv1d.weight
        E, taps = weight.shape[0], weight.shape[2]
        device, dtype = device or weight.device, dtype or weight.dtype
        return MambaState(
            conv=torch.zeros(batch, taps - 1, E, device=device, dtype=dtype),
            ssm=torch.zeros(batch, E, self.d_state, device=device, dtype=accumulate_dtype(dtype)),
        )

    def extend(self, x: Tensor, state: MambaState) -> tuple[Tensor, MambaState]:
        """Return (y [B,T,D], state after x): forward() of tokens x [B,T,D] that follow those the state has seen."""
        check_input(self, x, self.in_proj.weight)
        check_state(state, MambaState)
        if x.numel() == 0:
            return empty_output(self, x), state
        u, gate = self.in_proj(x).chunk(2, dim=-1)  # [B,T,E] each
        taps = self.conv1d.weight.squeeze(1)
        bias = self.conv1d.bias
        u, conv = short_conv_extend(u, taps, bias, state.conv, activation="silu", backend=self.backend)
        low_rank, B, C = self._split(u)
        # A kernel computes the step size, and the gradient of its bias with it. A CPU adds the bias inside the product.
        fuses = kernel_path(self.backend, u) == "triton" and is_plain(nn.Linear, self.dt_proj)
        dt_bias = self.dt_proj.bias if fuses else None
        dt = functional.linear(low_rank, self.dt_proj.weight) if fuses else functional.softplus(self.dt_proj(low_rank))
        rates = -torch.exp(self.A_log)
        y, ssm = selective_scan_extend(
            u, dt, rates, B, C, self.D, state.ssm, dt_bias=dt_bias, gate=gate, backend=self.backend
        )
        return self.out_proj(y), MambaState(conv, ssm)

    def state_size(self, seq_len: int) -> int:
        """Return how many numbers the state of one sequence holds: E (d_conv - 1 + d_state), whatever seq_len is."""
        return self.expand * self.d_model * (self.d_conv - 1 + self.d_state)

    def extra_repr(self) -> str:
        return named_arguments(self)

    def _split(self, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return dt before its projection [B,T,dt_rank] and B, C [B,T,N] of each token, from u [B,T,E]."""
        low_rank, B, C = self.x_proj(u).split([self.dt_rank, self.d_state, self.d_state], dim=-1)
        return low_rank, B, C
