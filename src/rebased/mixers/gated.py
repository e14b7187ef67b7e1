"""ReBased, Based and linear attention with a gate: each head forgets at a rate that it reads from the token."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rebased.mixers.checks import is_plain
from rebased.mixers.contract import register_mixer
from rebased.mixers.polynomial import PolynomialAttention
from rebased.mixers.rebased import Based, LinearAttention, ReBased
from rebased.mixers.recurrent import SPREADS_NAN
from rebased.ops import Norm, linear_step

LONG_MEMORY = 6.906768
"""The gate's first bias: sigmoid(6.9) = 0.999, a memory of a thousand tokens (as in power retention)."""


def log_sigmoid(logits: Tensor) -> Tensor:
    """Return ln sigmoid(logits), at most 0, in fp32 (fp64 for fp64)."""
    return functional.logsigmoid(logits.to(torch.promote_types(logits.dtype, torch.float32)))


class ForgetGate(nn.Linear):
    """Log decays from tokens: x [B,T,D] -> log sigmoid(W x + b) [B,T,H], at most 0, in fp32 (fp64 for fp64)."""

    def forward(self, x: Tensor) -> Tensor:
        return log_sigmoid(super().forward(x))

    def init_weights(self) -> None:
        """Set the bias so that memory is long at first."""
        nn.init.constant_(self.bias, LONG_MEMORY)


class _Gated(PolynomialAttention):
    """The gate. Its place among the base classes is before the mixer that it gates."""

    spreads_nan = SPREADS_NAN

    def __init__(self, d_model: int, **options: Any) -> None:
        super().__init__(d_model, **options)
        if options.get("kernel") == "learned":
            raise ValueError("kernel 'learned' does not go with a gate; choose 'square' or 'fourth'")
        self.forget = ForgetGate(d_model, self.n_heads, device=options.get("device"), dtype=options.get("dtype"))
        self.init_weights()

    def init_weights(self) -> None:
        """Set the gate's bias. The model calls it after its own init."""
        self.forget.init_weights()

    def gates(self, x: Tensor) -> dict[str, Any]:
        return {"log_decay": self.forget(x)}

    def step_gates(self, x: Tensor, norm: Norm | None) -> dict[str, Tensor]:
        logits = linear_step(x, self.forget.weight, self.forget.bias, norm=norm)
        return {"log_decay": log_sigmoid(logits)}

    def fuses_steps(self) -> bool:
        return super().fuses_steps() and is_plain(ForgetGate, self.forget)

    def attends_at(self, x: Tensor, n: int) -> bool:
        """Return False: chosen queries with a gate have no kernel."""
        return False


@register_mixer("gated_rebased")
class GatedReBased(_Gated, ReBased):
    """ReBased whose past fades: a similarity is multiplied by the gates of the tokens in between, per head.

    The gate of a token is sigmoid(W x + b), about 0.999 at first. The state has ReBased's size.

    Args:
        d_model: width D of x.
        n_heads, key_width, value_width, qk_transform, norm_axis, norm, eps, backend, device, dtype: as in ReBased.
        kernel: "square" (default) or "fourth", as in ReBased.

    Example:
        >>> layer = GatedReBased(d_model=768)
        >>> y = layer(torch.randn(2, 1024, 768))                             # [2, 1024, 768]
    """

    has_fused_step = True
    __signature__ = inspect.signature(ReBased)


@register_mixer("gated_based")
class GatedBased(_Gated, Based):
    """Based with the gate of GatedReBased.

    Args:
        d_model: width D of x.
        n_heads, key_width, value_width, eps, backend, device, dtype: as in Based.

    Example:
        >>> layer = GatedBased(d_model=768)
        >>> y = layer(torch.randn(2, 1024, 768))                             # [2, 1024, 768]
    """

    has_fused_step = True
    __signature__ = inspect.signature(Based)


@register_mixer("gated_linear_attention")
class GatedLinearAttention(_Gated, LinearAttention):
    """LinearAttention with the gate of GatedReBased and a denominator. It is not GLA (`gla`), which gates channels.

    Args:
        d_model: width D of x.
        n_heads, key_width, value_width, eps, backend, device, dtype: as in LinearAttention.

    Example:
        >>> layer = GatedLinearAttention(d_model=768)
        >>> y = layer(torch.randn(2, 1024, 768))                             # [2, 1024, 768]
    """

    __signature__ = inspect.signature(LinearAttention)
