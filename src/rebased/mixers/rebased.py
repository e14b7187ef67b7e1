"""ReBased, with the ablations of its norms and similarities, Based, and linear attention, which both improve."""

from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from rebased.mixers.attention_maps import scaled_products
from rebased.mixers.checks import is_plain
from rebased.mixers.contract import register_mixer
from rebased.mixers.polynomial import PolynomialAttention
from rebased.mixers.qk_norm import AffineNorm, NormAxis, QKNorm, QKTransform
from rebased.ops import (
    BASED,
    COMPLETED,
    REBASED,
    AnyCoefficients,
    Backend,
    Norm,
    complete_square,
    linear_layer_norm,
    pair_products,
    poly_attention,
)

Similarity = Literal["square", "fourth", "learned"]
"""The similarity as a function of s = q . k / sqrt(K): s^2, s^4, or c0 + c1 s + c2 s^2 with learnt coefficients."""

MAX_OPERATOR_WIDTH = 128
"""The widest queries and keys that the GPU kernels of the operator take."""

BASED_LOGITS = (0.541325, 0.881374, -0.432752)
"""Learnt coefficients begin as Based's, (1, 1, 1/2): softplus of the first and last, sigmoid of the second."""


@register_mixer("rebased")
class ReBased(PolynomialAttention):
    """ReBased linear attention (arXiv 2402.10644): similarity (q . k)^2 with learnt, normalised q and k.

    Maps x [B,T,D] to [B,T,D], never looks ahead, and takes time and memory linear in T. Its state for generation has a
    constant size. D is d_model, H n_heads, K key_width, V value_width.

    Args:
        d_model: width D of x.
        n_heads: number of heads H. Default 12, the paper's. Without `value_width` it must divide d_model.
        key_width: width K of each head's queries and keys. Default 16, the paper's.
        value_width: width V of each head's values. Default d_model / n_heads.
        qk_transform: what happens to q and k before the kernel: "none", "norm", "scale" (gamma), "affine" (gamma and
            beta) or "norm_affine" (LayerNorm with gamma and beta). Default "norm_affine", which is ReBased; the others
            are the ablations of the paper's Table 1.
        norm_axis: "joint" (default, the paper's): one norm over the H*K features of all heads for q, one for k.
            "each_head": each head is normalised by itself; gamma and beta are as in "joint". "per_head": each head by
            itself, with one gamma and beta of width K, shared by q, k and all heads, as in other public code.
        norm: "layer" (default, the paper's): LayerNorm. "rms": divided by the root mean square. "l2": by the length.
        kernel: the similarity of s = q . k / sqrt(K). "square" (default, ReBased's): s^2. "fourth": s^4, with
            K (K + 1) / 2 products as the operator's queries and keys; choose a small key_width, such as 5. "learned":
            c0 + c1 s + c2 s^2 with three learnt numbers, c0 and c2 positive and 0 <= c1 <= 2 sqrt(c0 c2), so that no
            similarity is negative. They begin as Based's. On a GPU, training takes the kernels with wider keys (K + 2,
            rounded up to a multiple of 8), and generation the chunked path.
        eps: added to the sum of similarities that divides each output. Default 1e-12.
        backend: "auto" (default): Triton kernels on a GPU, chunked torch elsewhere. "triton", "chunked", "recurrent"
            or "reference" (the equation, quadratic in T) choose one.
        device, dtype: where and in which dtype weights are made, as in torch.nn.Linear.

    torch.func (vmap, grad, ...) works unless backend="triton" is chosen. torch.compile works with fullgraph=True.

    Example:
        >>> layer = ReBased(d_model=768, n_heads=12, key_width=16)
        >>> y = layer(torch.randn(2, 1024, 768))                             # [2, 1024, 768]
        >>> state = layer.init_state(batch=2)
        >>> y, state = layer.extend(torch.randn(2, 1000, 768), state)        # prefill
        >>> y, state = layer.extend(torch.randn(2, 1, 768), state)           # decode one token
    """

    coefficients = REBASED
    has_fused_step = True
    added_later: tuple[str, ...] = ("norm", "kernel")

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: int = 12,
        key_width: int = 16,
        value_width: int | None = None,
        qk_transform: QKTransform = "norm_affine",
        norm_axis: NormAxis = "joint",
        norm: QKNorm = "layer",
        kernel: Similarity = "square",
        eps: float = 1e-12,
        backend: Backend = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            d_model, n_heads=n_heads, key_width=key_width, value_width=value_width, eps=eps, backend=backend,
            device=device, dtype=dtype,
        )  # fmt: skip
        if qk_transform not in get_args(QKTransform):
            raise ValueError(f"qk_transform {qk_transform!r} is unknown; choose one of {get_args(QKTransform)}")
        if norm_axis not in get_args(NormAxis):
            raise ValueError(
                f"norm_axis {norm_axis!r} is unknown; choose 'joint' (the paper's), 'each_head' or 'per_head'"
            )
        if norm not in get_args(QKNorm):
            raise ValueError(f"norm {norm!r} is unknown; choose one of {get_args(QKNorm)}")
        if kernel not in get_args(Similarity):
            raise ValueError(f"kernel {kernel!r} is unknown; choose one of {get_args(Similarity)}")
        self.qk_transform, self.norm_axis, self.norm, self.kernel = qk_transform, norm_axis, norm, kernel
        width = key_width if norm_axis == "per_head" else n_heads * key_width
        options: dict[str, Any] = {"norm": norm, "groups": n_heads if norm_axis == "each_head" else 1}
        options |= {"device": device, "dtype": dtype}
        self.ln_q = AffineNorm(width, qk_transform, **options)
        self.ln_k = self.ln_q if norm_axis == "per_head" else AffineNorm(width, qk_transform, **options)
        if kernel == "fourth":
            if self.operator_width > MAX_OPERATOR_WIDTH:
                raise ValueError(
                    f"kernel 'fourth' makes {self.operator_width} products of key_width {key_width}, more than the "
                    f"{MAX_OPERATOR_WIDTH} that the operator's kernels take; choose a key_width of at most 15"
                )
            self.scale = 1 / key_width
        self.kernel_logits = (
            nn.Parameter(torch.tensor(BASED_LOGITS, device=device, dtype=dtype)) if kernel == "learned" else None
        )

    @property
    def operator_width(self) -> int:
        """The width of the queries and keys that the operator is called with: K, or K (K + 1) / 2 products of them."""
        return self.key_width * (self.key_width + 1) // 2 if self.kernel == "fourth" else self.key_width

    def operator_coefficients(self) -> AnyCoefficients:
        if self.kernel_logits is None:
            return self.coefficients
        logits = self.kernel_logits.to(torch.promote_types(self.kernel_logits.dtype, torch.float32))
        c0, c2 = nn.functional.softplus(logits[0]), nn.functional.softplus(logits[2])
        return torch.stack([c0, 2 * (c0 * c2).sqrt() * logits[1].sigmoid(), c2])

    def attend(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None = None, **gates: Any) -> Tensor:
        """Return o [B,T,H,V] of what `project` returns; on a GPU by its kernels, also if coefficients are learnt."""
        coefficients = self.operator_coefficients()
        if not (isinstance(coefficients, Tensor) and q.is_cuda and self.backend in ("auto", "triton")):
            return super().attend(q, k, v, cu_seqlens, **gates)
        scale = self.operator_width**-0.5 if self.scale is None else self.scale
        q, k = complete_square(q, k, coefficients, scale)
        return poly_attention(
            q, k, v, coefficients=COMPLETED, scale=1.0, eps=self.eps, cu_seqlens=cu_seqlens, backend=self.backend
        )

    def project_queries(self, x: Tensor) -> Tensor:
        return self._project_one(x, self.proj_q, self.ln_q)

    def project_keys(self, x: Tensor) -> Tensor:
        return self._project_one(x, self.proj_k, self.ln_k)

    def _project_one(self, x: Tensor, proj: nn.Linear, norm: AffineNorm) -> Tensor:
        """Return the q or k of x after their norm and kernel: [B,T,D] -> [B,T,H*K].

        The paper's joint LayerNorm is computed together with its projection, unless a user has put a module of another
        class, or one with hooks, in the place of either.
        """
        plain = is_plain(nn.Linear, self.proj_q, self.proj_k) and is_plain(AffineNorm, self.ln_q, self.ln_k)
        if plain and self.ln_q.is_layer_norm and self.norm_axis == "joint" and self.kernel != "fourth":
            return linear_layer_norm(x, proj.weight, norm.weight, norm.bias, norm.eps)
        heads = (self.n_heads, self.key_width)
        x = proj(x)
        x = norm(x.unflatten(-1, heads)).flatten(-2) if self.norm_axis == "per_head" else norm(x)
        return pair_products(x.unflatten(-1, heads)).flatten(-2) if self.kernel == "fourth" else x

    def fuses_steps(self) -> bool:
        """Return True if `poly_step_` computes this mixer: the square of layer- or rms-normalised q . k."""
        return super().fuses_steps() and self.kernel == "square" and self.norm in ("layer", "rms")

    def qk_norms(self) -> tuple[Norm | None, Norm | None, bool]:
        return self.ln_q.as_norm(), self.ln_k.as_norm(), self.norm_axis == "joint"

    def qk_parameters(self) -> dict[str, Tensor]:
        """Return gamma and beta of q and k by name, where they exist: {"q.gamma": [H*K], "q.beta": ..., ...}.

        Norms that q and k share are called "qk.gamma" and "qk.beta". Records keep their statistics along training.
        """
        norms = {"q": self.ln_q, "k": self.ln_k} if self.ln_k is not self.ln_q else {"qk": self.ln_q}
        every = {
            f"{name}.{kind}": parameter
            for name, norm in norms.items()
            for kind, parameter in (("gamma", norm.weight), ("beta", norm.bias))
        }
        return {name: parameter for name, parameter in every.items() if parameter is not None}

    def raw_scores(self, x: Tensor) -> Tensor:
        """Return q . k / sqrt(K) of every pair before gamma and beta: x [B,T,D] -> [B,H,T,T], in fp32 (fp64 for fp64).

        The learnt similarity can be drawn against it: gamma and beta shift and scale the parabola.
        """
        heads = (self.n_heads, self.key_width)
        q, k = self.proj_q(x), self.proj_k(x)
        if self.norm_axis == "per_head":
            q, k = self.ln_q.before_affine(q.unflatten(-1, heads)), self.ln_k.before_affine(k.unflatten(-1, heads))
        else:
            q, k = self.ln_q.before_affine(q).unflatten(-1, heads), self.ln_k.before_affine(k).unflatten(-1, heads)
        return scaled_products(q, k, self.key_width**-0.5)


@register_mixer("based")
class Based(PolynomialAttention):
    """Based linear attention: similarity 1 + s + s^2 / 2, the Taylor series of exp(s), s = q . k / sqrt(K).

    Maps x [B,T,D] to [B,T,D], never looks ahead, and takes time and memory linear in T. Its state for generation has a
    constant size. D is d_model, H n_heads, K key_width, V value_width.

    Args:
        d_model: width D of x.
        n_heads: number of heads H. Default 12. Without `value_width` it must divide d_model.
        key_width: width K of each head's queries and keys. Default 16.
        value_width: width V of each head's values. Default d_model / n_heads.
        eps: added to the sum of similarities that divides each output. Default 1e-12.
        backend: "auto" (default): Triton kernels on a GPU, chunked torch elsewhere. "triton", "chunked", "recurrent"
            or "reference" (the equation, quadratic in T) choose one.
        device, dtype: where and in which dtype weights are made, as in torch.nn.Linear.

    torch.func (vmap, grad, ...) works unless backend="triton" is chosen. torch.compile works with fullgraph=True.

    Example:
        >>> layer = Based(d_model=768)
        >>> y = layer(torch.randn(2, 1024, 768))                             # [2, 1024, 768]
        >>> y, state = layer.extend(torch.randn(2, 1000, 768), layer.init_state(batch=2))
    """

    coefficients = BASED
    has_fused_step = True


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

    def project_queries(self, x: Tensor) -> Tensor:
        return nn.functional.elu(self.proj_q(x)) + 1

    def project_keys(self, x: Tensor) -> Tensor:
        return nn.functional.elu(self.proj_k(x)) + 1
