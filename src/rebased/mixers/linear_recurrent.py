"""Recurrent mixers that add and fade, and overwrite nothing: GLA and Mamba-2."""

from math import gcd
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rebased.mixers.contract import register_mixer
from rebased.mixers.delta import low_rank
from rebased.mixers.recurrent import RecurrentMixer, TimeStep
from rebased.mixers.wrapper import NORM_EPS, OutputGate
from rebased.ops import Backend

GLA_RANK, GLA_TEMPERATURE = 16, 16.0


@register_mixer("gla")
class GLA(RecurrentMixer):
    """Gated linear attention (arXiv 2312.06635): a sum that fades, with a decay per channel of the keys.

    Keys are half as wide as values; g = log sigmoid(W x + b) / 16 through a projection of rank 16; a norm per head and
    a SiLU gate. Maps x [B,T,D] to [B,T,D] and never looks ahead. The state has a constant size.

    Args:
        d_model: width D of x.
        n_heads: number of heads H; 2 H must divide d_model. Default 4.
        conv_width: taps of a short convolution with SiLU over q, k and v; 0 (default): none.
        output_gate: "silu" (default), "sigmoid" or "none".
        backend: "auto" (default) or "chunked": plain torch in chunks. "reference": token by token.
        device, dtype: where and in which dtype weights are made, as in torch.nn.Linear.

    Example:
        >>> layer = GLA(d_model=768)
        >>> y = layer(torch.randn(2, 1024, 768))                             # [2, 1024, 768]
    """

    normalise = False
    added_later = ("conv_width", "output_gate")

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: int = 4,
        conv_width: int = 0,
        output_gate: OutputGate = "silu",
        backend: Backend = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if n_heads < 1 or d_model % (2 * n_heads):
            raise ValueError(f"d_model {d_model} is not divisible by 2 n_heads = {2 * n_heads}")
        super().__init__(
            d_model, n_heads, d_model // (2 * n_heads), d_model // n_heads, conv_width=conv_width,
            output_gate=output_gate, backend=backend, device=device, dtype=dtype,
        )  # fmt: skip
        self.proj_decay = low_rank(d_model, GLA_RANK, d_model // 2, bias=True, device=device, dtype=dtype)

    def heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().heads(qkv)
        return q * self.key_width**-0.5, k, v

    def gates(self, x: Tensor) -> tuple[None, Tensor]:
        logits = self.proj_decay(x).to(torch.promote_types(x.dtype, torch.float32))
        decay = functional.logsigmoid(logits) / GLA_TEMPERATURE
        return None, decay.unflatten(-1, (self.n_heads, self.key_width))


@register_mixer("mamba2")
class Mamba2(RecurrentMixer):
    """Mamba-2 (arXiv 2405.21060): a sum that fades, with one decay per head and queries and keys that all heads share.

    2 D channels in heads; a short convolution with SiLU; dt = softplus(W x + b), g = -e^A dt, values times dt; a skip
    D v; RMSNorm(y SiLU(z)) over all heads. Maps x [B,T,D] to [B,T,D] and never looks ahead. The state has a constant
    size.

    Args:
        d_model: width D of x.
        d_state: width N of queries and keys. Default 128.
        head_width: width of each head's values. It must divide 2 D. Default 64, or the largest power of two that does.
        conv_width: taps of the short convolution. Default 4.
        backend: "auto" (default) or "chunked": plain torch in chunks. "reference": token by token.
        device, dtype: where and in which dtype weights are made, as in torch.nn.Linear.

    Example:
        >>> layer = Mamba2(d_model=768)
        >>> y = layer(torch.randn(2, 1024, 768))                             # [2, 1024, 768]
    """

    normalise = False
    built_in = ("output_gate",)

    def __init__(
        self,
        d_model: int,
        *,
        d_state: int = 128,
        head_width: int | None = None,
        conv_width: int = 4,
        backend: Backend = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        inner = 2 * d_model
        head_width = head_width or gcd(inner, 64)
        if inner % head_width:
            raise ValueError(f"head_width {head_width} does not divide 2 d_model = {inner}")
        n_heads = inner // head_width
        super().__init__(
            d_model, n_heads, d_state, head_width, conv_width=conv_width, output_gate="silu", backend=backend,
            device=device, dtype=dtype,
        )  # fmt: skip
        self.d_state, self.head_width = d_state, head_width
        self.head_norm = nn.RMSNorm(inner, eps=NORM_EPS, device=device, dtype=dtype)  # one norm over all heads
        self.proj_decay = nn.Linear(d_model, n_heads, bias=False, device=device, dtype=dtype)
        self.time_step = TimeStep(n_heads, 1, (1.0, 16.0), device=device, dtype=dtype)
        self.skip = nn.Parameter(torch.ones(n_heads, device=device, dtype=dtype))

    @property
    def widths(self) -> tuple[int, int, int]:
        """The widths of q and k, which all heads share, and of v."""
        return self.key_width, self.key_width, self.n_heads * self.value_width

    def make_conv(self, channels: int, width: int, **factory: Any) -> nn.Conv1d:
        return nn.Conv1d(channels, channels, width, groups=channels, **factory)

    def attend(self, x: Tensor, qkv: Tensor, memory: Tensor, **how: Any) -> tuple[Tensor, Tensor]:
        """Return o + D v [B,T,H,V] and the memory after x, as RecurrentMixer does. Values are written times dt."""
        q, k, v = qkv.split(self.widths, dim=-1)
        q, k = (each.unsqueeze(2).expand(-1, -1, self.n_heads, -1) for each in (q, k))
        v = v.unflatten(-1, (self.n_heads, self.value_width))
        dt, log_decay = self.time_step(self.proj_decay(x))
        o, memory = self.recur(q, k, (v * dt).to(v.dtype), None, memory, log_decay.squeeze(-1), **how)
        return o + self.skip.to(v.dtype).unsqueeze(-1) * v, memory

    def finish(self, x: Tensor, o: Tensor) -> Tensor:
        """Return y [B,T,D]: the gate, then one norm over all heads, then the last projection."""
        assert self.proj_gate is not None
        gated = o.flatten(-2) * functional.silu(self.proj_gate(x))
        return self.proj_o(self.head_norm(gated.to(self.head_norm.weight.dtype)))
