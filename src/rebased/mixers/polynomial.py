"""ReBased and Based: linear attention whose similarity is a parabola of q . k."""

from typing import Literal, get_args

import torch
from torch import Tensor, nn

from rebased.mixers.contract import Earlier, register_mixer
from rebased.ops import (
    BASED,
    REBASED,
    Backend,
    Coefficients,
    PolyState,
    feature_count,
    init_poly_state,
    layer_norm,
    poly_attention,
    poly_attention_extend,
    poly_state,
)

QKTransform = Literal["none", "norm", "scale", "affine", "norm_affine"]
"""What happens to q and k before the squared kernel, the rows of the paper's Table 1 in their order:
x^2, norm(x)^2, (gamma x)^2, (gamma x + beta)^2 and ReBased itself, (gamma norm(x) + beta)^2."""


class AffineNorm(nn.Module):
    """LayerNorm with each of its three parts optional; the answer has x's dtype, under autocast too."""

    def __init__(self, width: int, transform: QKTransform, eps: float = 1e-5) -> None:
        super().__init__()
        self.normalise = transform in ("norm", "norm_affine")
        self.eps = eps
        has_scale, has_shift = transform in ("scale", "affine", "norm_affine"), transform in ("affine", "norm_affine")
        self.weight = nn.Parameter(torch.ones(width)) if has_scale else None
        self.bias = nn.Parameter(torch.zeros(width)) if has_shift else None

    def forward(self, x: Tensor) -> Tensor:
        if self.normalise:
            return layer_norm(x, self.weight, self.bias, self.eps)
        if self.weight is not None:
            x = x * self.weight.to(x.dtype)
        return x if self.bias is None else x + self.bias.to(x.dtype)


class PolynomialAttention(nn.Module):
    """What ReBased and Based share: projections without biases around one operator, `poly_attention`."""

    coefficients: Coefficients

    def __init__(
        self, d_model: int, n_heads: int, key_width: int, value_width: int | None, eps: float, backend: Backend
    ) -> None:
        super().__init__()
        if value_width is None:
            if d_model % n_heads:
                raise ValueError(
                    f"d_model {d_model} is not divisible by n_heads {n_heads}; choose one that is, or give value_width "
                    f"(the paper's presets use the floor, {d_model // n_heads}, and lose {d_model % n_heads} features)"
                )
            value_width = d_model // n_heads
        if min(n_heads, key_width, value_width) < 1:
            raise ValueError(
                f"n_heads {n_heads}, key_width {key_width} and value_width {value_width} must all be at least 1 "
                f"(at d_model {d_model})"
            )
        self.n_heads, self.key_width, self.value_width = n_heads, key_width, value_width
        self.eps, self.backend = eps, backend
        self.proj_q = nn.Linear(d_model, n_heads * key_width, bias=False)
        self.proj_k = nn.Linear(d_model, n_heads * key_width, bias=False)
        self.proj_v = nn.Linear(d_model, n_heads * value_width, bias=False)
        self.proj_o = nn.Linear(n_heads * value_width, d_model, bias=False)

    def transform(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """What happens to q, k [B,T,H*K] before the kernel: nothing, unless a subclass says otherwise."""
        return q, k

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The q, k [B,T,H,K] and v [B,T,H,V] that the kernel meets."""
        v = self.proj_v(x)
        q, k = self.transform(self.proj_q(x), self.proj_k(x))
        return (
            q.unflatten(-1, (self.n_heads, self.key_width)),
            k.unflatten(-1, (self.n_heads, self.key_width)),
            v.unflatten(-1, (self.n_heads, self.value_width)),
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x)
        o = poly_attention(q, k, v, coefficients=self.coefficients, eps=self.eps, backend=self.backend)
        return self.proj_o(o.flatten(-2))

    def forward_documents(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        q, k, v = (each.flatten(0, 1).unsqueeze(0) for each in self.project(x))  # [1,B*T,H,K]
        o = poly_attention(
            q, k, v, coefficients=self.coefficients, eps=self.eps, cu_seqlens=cu_seqlens, backend=self.backend
        )
        return self.proj_o(o.flatten(-2)).view_as(x)

    def forward_part(self, x: Tensor, earlier: Earlier) -> Tensor:
        q, k, v = self.project(x)
        kv, z = poly_state(k, v, coefficients=self.coefficients)
        before = earlier(torch.cat([kv, z.unsqueeze(-1)], dim=-1)).sum(0)  # [B,H,F,V+1]: one message, not two
        state = PolyState(kv=before[..., :-1].contiguous(), z=before[..., -1].contiguous())
        o, _ = poly_attention_extend(q, k, v, state, coefficients=self.coefficients, eps=self.eps, backend=self.backend)
        return self.proj_o(o.flatten(-2))

    def init_state(
        self, batch: int, *, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> PolyState:
        return init_poly_state(
            batch,
            self.n_heads,
            self.key_width,
            self.value_width,
            self.coefficients,
            device=device or self.proj_q.weight.device,
            dtype=dtype or self.proj_q.weight.dtype,
        )

    def extend(self, x: Tensor, state: PolyState) -> tuple[Tensor, PolyState]:
        q, k, v = self.project(x)
        o, state = poly_attention_extend(
            q, k, v, state, coefficients=self.coefficients, eps=self.eps, backend=self.backend
        )
        return self.proj_o(o.flatten(-2)), state

    def state_size(self, seq_len: int) -> int:
        return self.n_heads * feature_count(self.key_width, self.coefficients) * (self.value_width + 1)


@register_mixer("rebased")
class ReBased(PolynomialAttention):
    """(q . k)^2 with learnt, normalised q and k.

    `norm_axis="joint"` is the paper's: one LayerNorm over all heads' features for q and one for k. "per_head" shares
    one gamma and beta of a head's width among q, k and all heads, as other public code does.
    """

    coefficients = REBASED

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: int = 12,
        key_width: int = 16,
        value_width: int | None = None,
        qk_transform: QKTransform = "norm_affine",
        norm_axis: Literal["joint", "per_head"] = "joint",
        eps: float = 1e-12,
        backend: Backend = "auto",
    ) -> None:
        super().__init__(d_model, n_heads, key_width, value_width, eps, backend)
        if qk_transform not in get_args(QKTransform):
            raise ValueError(f"qk_transform {qk_transform!r} is unknown; choose one of {get_args(QKTransform)}")
        if norm_axis not in ("joint", "per_head"):
            raise ValueError(f"norm_axis {norm_axis!r} is unknown; choose 'joint' (the paper's) or 'per_head'")
        self.norm_axis = norm_axis
        self.ln_q = AffineNorm(n_heads * key_width if norm_axis == "joint" else key_width, qk_transform)
        self.ln_k = AffineNorm(n_heads * key_width, qk_transform) if norm_axis == "joint" else self.ln_q

    def transform(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if self.norm_axis == "joint":
            return self.ln_q(q), self.ln_k(k)
        heads = (self.n_heads, self.key_width)
        return self.ln_q(q.unflatten(-1, heads)).flatten(-2), self.ln_k(k.unflatten(-1, heads)).flatten(-2)


@register_mixer("based")
class Based(PolynomialAttention):
    """1 + s + s^2/2, the Taylor series of exp(s) that ReBased revisits."""

    coefficients = BASED

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: int = 12,
        key_width: int = 16,
        value_width: int | None = None,
        eps: float = 1e-12,
        backend: Backend = "auto",
    ) -> None:
        super().__init__(d_model, n_heads, key_width, value_width, eps, backend)
