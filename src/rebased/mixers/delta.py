"""Mixers of the delta rule: DeltaReBased (squares), DeltaNet, Gated DeltaNet and KDA; on request as sums."""

from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from rebased.mixers.contract import register_mixer
from rebased.mixers.gated import ForgetGate
from rebased.mixers.recurrent import RecurrentMixer, TimeStep
from rebased.mixers.wrapper import OutputGate
from rebased.ops import Backend, delta_coefficients

Decay = Literal["sigmoid", "softplus"]
RATES = (1e-3, 16.0)
"""Of Gated DeltaNet: its own code draws from 0, whose logarithm is -inf."""


class _Delta(RecurrentMixer):
    """Overwrites, with beta = sigmoid(W x) per head or twice that; without `delta` it adds. With a `decay` each head
    forgets: "sigmoid" of W x + b, or that of Gated DeltaNet, "softplus"."""

    def __init__(
        self, d_model: int, n_heads: int, *widths: int, decay: Decay | None, negative: bool = False,
        delta: bool = True, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(d_model, n_heads, *widths, **options)
        if negative and not delta:
            raise ValueError("negative: true makes beta wider, which a sum (delta: false) does not have; leave one out")
        self.negative, self.delta, self.overwrites = negative, delta, delta
        factory: dict[str, Any] = {"device": options["device"], "dtype": options["dtype"]}
        self.proj_beta = nn.Linear(d_model, n_heads, bias=False, **factory) if delta else None
        self.forget = ForgetGate(d_model, n_heads, **factory) if decay == "sigmoid" else None
        softplus = decay == "softplus"
        self.proj_decay: nn.Module | None = nn.Linear(d_model, n_heads, bias=False, **factory) if softplus else None
        self.time_step = TimeStep(n_heads, 1, RATES, **factory) if softplus else None

    def beta(self, x: Tensor) -> Tensor | None:
        """Return beta [B,T,H] of x [B,T,D], from 0 to 1, or to 2 with `negative`; None without `delta`."""
        if self.proj_beta is None:
            return None
        beta = torch.sigmoid(self.proj_beta(x).to(torch.promote_types(x.dtype, torch.float32)))
        return 2 * beta if self.negative else beta

    def gates(self, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return beta [B,T,H] and the log decay [B,T,H], or [B,T,H,K] if there is one per channel; None without."""
        if self.forget is not None:
            return self.beta(x), self.forget(x)
        if self.proj_decay is None or self.time_step is None:
            return self.beta(x), None
        return self.beta(x), self.time_step(self.proj_decay(x))[1].squeeze(-1)


@register_mixer("delta_rebased")
class DeltaReBased(_Delta):
    """The delta rule on the squared kernel: each token corrects what the state returns for its key.

    Similarities are (q . k)^2 of q and k of length 1. A key's new value replaces the old one, where ReBased returns a
    mixture of both. There is no denominator; a norm follows each head. Maps x [B,T,D] to [B,T,D] and never looks ahead.
    The state has a constant size.

    Args:
        d_model: width D of x.
        n_heads: number of heads H. Default 12. Without `value_width` it must divide d_model.
        key_width: width K of each head's queries and keys. Default 16.
        value_width: width V of each head's values. Default d_model / n_heads.
        gate: True: each head also forgets. Default False.
        decay: of the gate: "sigmoid" (default) of W x + b, about 0.999 at first; "softplus", that of Gated DeltaNet,
            with memories of many lengths at first.
        centred: True: similarities (s^2 - 1/K) / (1 - 1/K), zero on average. Default False.
        negative: True: beta from 0 to 2, so that a state can change its sign. Default False: 0 to 1.
        delta: False: values are added as they are: a sum, with a norm in place of a denominator. Default True.
        conv_width: taps of a short convolution with SiLU over q, k and v; 0 (default): none.
        output_gate: "none" (default), "silu" or "sigmoid" of a projection of x, times the normed heads.
        backend: "auto" (default) or "chunked": plain torch in chunks. "reference": token by token.
        device, dtype: where and in which dtype weights are made, as in torch.nn.Linear.

    Example:
        >>> layer = DeltaReBased(d_model=768)
        >>> y = layer(torch.randn(2, 1024, 768))                             # [2, 1024, 768]
        >>> y, state = layer.extend(torch.randn(2, 1000, 768), layer.init_state(batch=2))
    """

    degree = 2
    added_later = ("delta", "decay")

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: int = 12,
        key_width: int = 16,
        value_width: int | None = None,
        gate: bool = False,
        decay: Decay = "sigmoid",
        centred: bool = False,
        negative: bool = False,
        delta: bool = True,
        conv_width: int = 0,
        output_gate: OutputGate = "none",
        backend: Backend = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if decay not in get_args(Decay):
            raise ValueError(f"decay {decay!r} is unknown; choose one of {', '.join(get_args(Decay))}")
        if decay != "sigmoid" and not gate:
            raise ValueError(f"decay: {decay} is that of a gate; set gate: true")
        super().__init__(
            d_model, n_heads, key_width, _head_width(d_model, n_heads, value_width), decay=decay if gate else None,
            negative=negative, delta=delta, conv_width=conv_width, output_gate=output_gate, backend=backend,
            device=device, dtype=dtype,
        )  # fmt: skip
        delta_coefficients(2, key_width, centred)  # a width that cannot be centred is refused here
        self.centred, self.gate, self.decay = centred, gate, decay
        self.init_weights()


@register_mixer("gated_delta_net")
class GatedDeltaNet(_Delta):
    """Gated DeltaNet (arXiv 2412.06464): the delta rule of degree 1 with a decay per head.

    A short convolution with SiLU over q, k and v, q and k of length 1, g = -e^A softplus(W x + dt), a norm per head and
    a SiLU gate. Maps x [B,T,D] to [B,T,D] and never looks ahead. The state has a constant size.

    Args:
        d_model: width D of x.
        n_heads: number of heads H. Default 4.
        key_width: width K of each head's queries and keys. Default d_model / n_heads.
        value_width: width V of each head's values. Default 2 K.
        gate: False: nothing fades, which is DeltaNet (arXiv 2406.06484). Default True.
        negative: True: beta from 0 to 2, so that a state can change its sign. Default False: 0 to 1.
        delta: False: values are added as they are: linear attention with a norm in place of a denominator, as in
            TransNormer (arXiv 2210.10340). Default True.
        conv_width: taps of the short convolution; 0: none. Default 4.
        output_gate: "silu" (default), "sigmoid" or "none".
        backend, device, dtype: as in DeltaReBased.

    Example:
        >>> layer = GatedDeltaNet(d_model=768)
        >>> y = layer(torch.randn(2, 1024, 768))                             # [2, 1024, 768]
    """

    scaled = True
    added_later = ("delta",)

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: int = 4,
        key_width: int | None = None,
        value_width: int | None = None,
        gate: bool = True,
        negative: bool = False,
        delta: bool = True,
        conv_width: int = 4,
        output_gate: OutputGate = "silu",
        backend: Backend = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        key_width = _head_width(d_model, n_heads, key_width)
        value_width = 2 * key_width if value_width is None else value_width
        super().__init__(
            d_model, n_heads, key_width, value_width, decay="softplus" if gate else None, negative=negative,
            delta=delta, conv_width=conv_width, output_gate=output_gate, backend=backend, device=device, dtype=dtype,
        )  # fmt: skip
        self.gate = gate


@register_mixer("kda")
class KDA(_Delta):
    """Kimi Delta Attention (arXiv 2510.26692): Gated DeltaNet with a decay per channel of the keys.

    The decay and the output gate are projections of low rank. Maps x [B,T,D] to [B,T,D] and never looks ahead. The
    state has a constant size.

    Args:
        d_model: width D of x.
        n_heads: number of heads H. Default 4.
        key_width: width K of each head's queries, keys and values. Default d_model / n_heads.
        negative, conv_width, backend, device, dtype: as in GatedDeltaNet.

    Example:
        >>> layer = KDA(d_model=768)
        >>> y = layer(torch.randn(2, 1024, 768))                             # [2, 1024, 768]
    """

    scaled = True
    built_in = ("output_gate",)

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: int = 4,
        key_width: int | None = None,
        negative: bool = False,
        conv_width: int = 4,
        backend: Backend = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        K = _head_width(d_model, n_heads, key_width)
        super().__init__(
            d_model, n_heads, K, K, decay=None, negative=negative, conv_width=conv_width, output_gate="none",
            backend=backend, device=device, dtype=dtype,
        )  # fmt: skip
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.proj_decay = low_rank(d_model, K, n_heads * K, bias=False, **factory)
        self.time_step = TimeStep(n_heads, K, (1.0, 16.0), device=device, dtype=dtype)
        self.output_gate = "sigmoid"
        self.proj_gate = low_rank(d_model, K, n_heads * K, bias=True, **factory)  # type: ignore[assignment]


def low_rank(
    width_in: int, rank: int, width_out: int, *, bias: bool, device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> nn.Sequential:  # fmt: skip
    """Return a projection through a narrow layer; only the second part has a bias."""
    first = nn.Linear(width_in, rank, bias=False, device=device, dtype=dtype)
    return nn.Sequential(first, nn.Linear(rank, width_out, bias=bias, device=device, dtype=dtype))


def _head_width(d_model: int, n_heads: int, width: int | None) -> int:
    """Return the width of a head, or d_model / n_heads if it is None."""
    if width is not None:
        return width
    if n_heads < 1 or d_model % n_heads:
        raise ValueError(f"d_model {d_model} is not divisible by n_heads {n_heads}; choose one that is, or give widths")
    return d_model // n_heads
