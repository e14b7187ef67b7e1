"""Linear attention with the feature map elu(x) + 1: the baseline that Based and ReBased improve."""

import torch
from torch import Tensor
from torch.nn import functional

from rebased.mixers.contract import register_mixer
from rebased.mixers.polynomial import PolynomialAttention
from rebased.ops import Backend


@register_mixer("linear_attention")
class LinearAttention(PolynomialAttention):
    """Linear attention (arXiv 2006.16236): similarity phi(q) . phi(k) with phi(x) = elu(x) + 1.

    Maps x [B,T,D] to [B,T,D], never looks ahead, and takes time and memory linear in T. It is `poly_attention`
    with coefficients (0, 1, 0) of phi(q) and phi(k). Its state holds H K (V + 1) numbers: it has K features per head
    where ReBased has K (K + 1) / 2.

    Args:
        d_model: width D of x.
        n_heads: number of heads H. Default 12. Without `value_width` it must divide d_model.
        key_width: width K of each head's queries and keys. Default 16.
        value_width: width V of each head's values. Default d_model / n_heads.
        eps: added to the sum of similarities that divides each output. Default 1e-12.
        backend: as in ReBased.
        device, dtype: where and in which dtype weights are made, as in torch.nn.Linear.

    Example:
        >>> layer = LinearAttention(d_model=768)
        >>> y = layer(torch.randn(2, 1024, 768))                             # [2, 1024, 768]
        >>> y, state = layer.extend(torch.randn(2, 1000, 768), layer.init_state(batch=2))
    """

    coefficients = (0.0, 1.0, 0.0)
    scale = 1.0

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: int = 12,
        key_width: int = 16,
        value_width: int | None = None,
        eps: float = 1e-12,
        backend: Backend = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(d_model, n_heads, key_width, value_width, eps, backend, device, dtype)

    def project_queries(self, x: Tensor) -> Tensor:
        return functional.elu(self.proj_q(x)) + 1

    def project_keys(self, x: Tensor) -> Tensor:
        return functional.elu(self.proj_k(x)) + 1
