"""ReBased and Based: linear attention whose similarity is a second-degree polynomial of q . k."""

from functools import cached_property
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from rebased.mixers.attention_maps import weigh
from rebased.mixers.checks import check_input, check_torch_func, empty_output, is_plain
from rebased.mixers.context_parallel import GatherEarlier
from rebased.mixers.contract import register_mixer
from rebased.mixers.qk_norm import AffineNorm, NormAxis, QKNorm, QKTransform
from rebased.mixers.slots import FixedSlots
from rebased.ops import (
    BASED,
    REBASED,
    AnyCoefficients,
    Backend,
    Coefficients,
    Norm,
    PolyState,
    feature_count,
    init_poly_state,
    linear_layer_norm,
    linear_step,
    pair_products,
    poly_attention,
    poly_attention_extend,
    poly_attention_extend_,
    poly_attention_map,
    poly_state,
    poly_step_,
)

Similarity = Literal["square", "fourth", "learned"]
"""The similarity as a function of s = q . k / sqrt(K): s^2, s^4, or c0 + c1 s + c2 s^2 with learnt coefficients."""

MAX_OPERATOR_WIDTH = 128
"""The widest queries and keys that the GPU kernels of the operator take."""

BASED_LOGITS = (0.541325, 0.881374, -0.432752)
"""Learnt coefficients begin as Based's, (1, 1, 1/2): softplus of the first and last, sigmoid of the second."""


class PolynomialAttention(nn.Module):
    """Base class of ReBased and Based: four projections without biases around one operator, `poly_attention`.

    A subclass sets `coefficients` (c0, c1, c2): the similarity of a query and a key is c0 + c1 s + c2 s^2,
    s = q . k / sqrt(key_width). The weights are proj_q, proj_k [H*K, D], proj_v [H*V, D] and proj_o [D, H*V].
    """

    coefficients: Coefficients
    scale: float | None = None  # of q . k in the operator; None: operator_width ** -0.5
    residual_projections: tuple[
        str, ...
    ] = ()  # proj_o starts at N(0, 0.02) like the other projections, as in the paper's runs

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        key_width: int,
        value_width: int | None,
        eps: float,
        backend: Backend,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if n_heads < 1:
            raise ValueError(f"n_heads {n_heads} must be at least 1 (at d_model {d_model})")
        if value_width is None:
            if d_model % n_heads:
                raise ValueError(
                    f"d_model {d_model} is not divisible by n_heads {n_heads}; choose one that is, or give value_width "
                    f"(the paper's presets use the floor, {d_model // n_heads}, and lose {d_model % n_heads} features)"
                )
            value_width = d_model // n_heads
        if min(key_width, value_width) < 1:
            raise ValueError(
                f"key_width {key_width} and value_width {value_width} must be at least 1 "
                f"(at n_heads {n_heads}, d_model {d_model})"
            )
        self.d_model, self.n_heads, self.key_width, self.value_width = d_model, n_heads, key_width, value_width
        self.eps, self.backend = eps, backend
        keys, values = n_heads * key_width, n_heads * value_width
        self.proj_q = nn.Linear(d_model, keys, bias=False, device=device, dtype=dtype)
        self.proj_k = nn.Linear(d_model, keys, bias=False, device=device, dtype=dtype)
        self.proj_v = nn.Linear(d_model, values, bias=False, device=device, dtype=dtype)
        self.proj_o = nn.Linear(values, d_model, bias=False, device=device, dtype=dtype)

    @property
    def operator_width(self) -> int:
        """The width of the queries and keys that the operator is called with: here key_width."""
        return self.key_width

    def operator_coefficients(self) -> AnyCoefficients:
        """Return the coefficients for the operator: three numbers, or a tensor [3] where they are learnt."""
        return self.coefficients

    def transform(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return q, k [B,T,H*K] as the kernel needs them. Here they stay as they are; ReBased overrides it."""
        return q, k

    def project_qk(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the q and k of x after their transform: [B,T,D] -> [B,T,H*K] each."""
        return self.transform(self.proj_q(x), self.proj_k(x))

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the q, k [B,T,H,K] and v [B,T,H,V] that the operator is called with, from x [B,T,D]."""
        check_input(self, x, self.proj_q.weight)
        check_torch_func(self, x, self.backend)
        v = self.proj_v(x)
        q, k = self.project_qk(x)
        return (
            q.unflatten(-1, (self.n_heads, self.operator_width)),
            k.unflatten(-1, (self.n_heads, self.operator_width)),
            v.unflatten(-1, (self.n_heads, self.value_width)),
        )

    def _kernel(self) -> dict[str, Any]:
        """Return what every call of the operator is told of the similarity."""
        return {"coefficients": self.operator_coefficients(), "scale": self.scale, "eps": self.eps}

    def forward(self, x: Tensor) -> Tensor:
        """Return causal attention over time: x [B,T,D] -> [B,T,D], time and memory linear in T.

        x has the dtype and device of the weights; under autocast any floating dtype. B and T may be 0.
        """
        q, k, v = self.project(x)
        if x.numel() == 0:
            return empty_output(self, x)
        o = poly_attention(q, k, v, **self._kernel(), backend=self.backend)
        return self.proj_o(o.flatten(-2))

    def forward_documents(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Return forward() of each packed document by itself: x [B,T,D] -> [B,T,D] (mixers/documents.py).

        cu_seqlens [n+1], int32 or int64, says where documents begin in the B*T tokens; its last number is B*T.
        """
        q, k, v = (each.flatten(0, 1).unsqueeze(0) for each in self.project(x))  # [1,B*T,H,K]
        o = poly_attention(q, k, v, **self._kernel(), cu_seqlens=cu_seqlens, backend=self.backend)
        return self.proj_o(o.flatten(-2)).view_as(x)

    def forward_shard(self, x: Tensor, gather_earlier: GatherEarlier) -> Tensor:
        """Return forward() of the whole sequence at this rank's shard x [B,T,D] (mixers/context_parallel.py).

        Each rank sends one state of constant size, however long the sequence is.
        """
        q, k, v = self.project(x)
        kv, z = poly_state(k, v, coefficients=self.operator_coefficients())
        before = gather_earlier(torch.cat([kv, z.unsqueeze(-1)], dim=-1)).sum(0)  # [B,H,F,V+1]: one message, not two
        state = PolyState(kv=before[..., :-1].contiguous(), z=before[..., -1].contiguous())
        o, _ = poly_attention_extend(q, k, v, state, **self._kernel(), backend=self.backend)
        return self.proj_o(o.flatten(-2))

    def init_state(
        self, batch: int, *, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> PolyState:
        """Return the state before the first token: PolyState(kv [B,H,F,V], z [B,H,F]), all zeros.

        F is the number of features of a key: K (K + 1) / 2 for ReBased, 1 + K + K (K + 1) / 2 for Based. `dtype` is
        the dtype of x; the state is fp32 (fp64 for fp64). Device and dtype are those of the weights unless given.
        """
        return init_poly_state(
            batch,
            self.n_heads,
            self.operator_width,
            self.value_width,
            self.operator_coefficients(),
            device=device or self.proj_q.weight.device,
            dtype=dtype or self.proj_q.weight.dtype,
        )

    def extend(self, x: Tensor, state: PolyState) -> tuple[Tensor, PolyState]:
        """Return (y [B,T,D], state after x): forward() of tokens x [B,T,D] that follow those the state has seen.

        Prefill is one call with many tokens, decoding one call per token (T = 1). The given state is not changed.
        """
        q, k, v = self.project(x)
        if x.numel() == 0:
            return empty_output(self, x), state
        o, state = poly_attention_extend(q, k, v, state, **self._kernel(), backend=self.backend)
        return self.proj_o(o.flatten(-2)), state

    def extend_documents(self, x: Tensor, cu_seqlens: Tensor, state: PolyState) -> tuple[Tensor, PolyState]:
        """Return (y [1,N,D], state after x): extend() of each packed document by itself (mixers/documents.py)."""
        q, k, v = self.project(x)
        o, state = poly_attention_extend(q, k, v, state, **self._kernel(), cu_seqlens=cu_seqlens, backend=self.backend)
        return self.proj_o(o.flatten(-2)), state

    def extend_(self, x: Tensor, state: PolyState) -> Tensor:
        """Return y [B,1,D] of `extend` for one token x [B,1,D], and overwrite the state by the one after it.

        A step of decoding reads and writes the state once, and allocates nothing of its size. There are no gradients.
        """
        q, k, v = self.project(x)
        o = poly_attention_extend_(q, k, v, state, **self._kernel(), backend=self.backend)
        return self.proj_o(o.flatten(-2))

    @property
    def slots_class(self) -> type[FixedSlots]:
        """Slots whose steps are fused, unless something was changed that they would not see (mixers/slots.py)."""
        return PolynomialSlots if self.fuses_steps() else FixedSlots

    def fuses_steps(self) -> bool:
        """Return True if `poly_step_` computes this mixer."""
        layers = (self.proj_q, self.proj_k, self.proj_v, self.proj_o)
        known = type(self) in (ReBased, Based) and not isinstance(self.operator_coefficients(), Tensor)
        return known and self.backend in ("auto", "triton") and is_plain(nn.Linear, *layers)

    def qk_norms(self) -> tuple[Norm | None, Norm | None, bool]:
        """Return the norms of q and k as numbers, and whether all heads are normalised together. Here there is none."""
        return None, None, True

    def attention_map(self, x: Tensor) -> Tensor:
        """Return the attention matrix, computed again from q and k: x [B,T,D] -> [B,H,T,T] (mixers/attention_maps.py).

        Row i sums to den / (den + eps), den being the sum of its similarities.
        """
        q, k, _ = self.project(x)
        return poly_attention_map(q, k, **self._kernel())

    def apply_attention(self, attention: Tensor, x: Tensor) -> Tensor:
        """Return the output [B,T,D] for x [B,T,D] if the matrix were `attention` [B,H,T,T]."""
        return self.proj_o(weigh(attention, self.project(x)[2]).flatten(-2))

    def attention_scores(self, x: Tensor) -> Tensor:
        """Return the operator's s of every pair, q . k / sqrt(K): x [B,T,D] -> [B,H,T,T], in fp32 (fp64 for fp64)."""
        q, k, _ = self.project(x)
        return _products(q, k, self.operator_width**-0.5 if self.scale is None else self.scale)

    def similarity(self, scores: Tensor) -> Tensor:
        """Return c0 + c1 s + c2 s^2 of scores s: any shape -> the same shape."""
        c0, c1, c2 = self.operator_coefficients()
        return c0 + scores * (c1 + c2 * scores)

    def state_size(self, seq_len: int) -> int:
        """Return how many numbers the state of one sequence holds: H F (V + 1), whatever seq_len is."""
        features = feature_count(self.operator_width, self.operator_coefficients())
        return self.n_heads * features * (self.value_width + 1)

    def extra_repr(self) -> str:
        return (
            f"d_model={self.d_model}, n_heads={self.n_heads}, key_width={self.key_width}, "
            f"value_width={self.value_width}, eps={self.eps}, backend={self.backend!r}"
        )


class PolynomialSlots(FixedSlots):
    """Slots whose step is three kernels: norm and projections, the operator with the norms of q and k, the output."""

    def step_fused(self, x: Tensor, norm: Norm, lengths: Tensor, longest: int) -> Tensor:
        """Return x + mixer(norm(x)) [count,D] of one more token x [count,D] per slot, and overwrite the states."""
        mixer = self._mixer
        q_norm, k_norm, joint = mixer.qk_norms()
        o = poly_step_(
            linear_step(x, self._qkv, norm=norm),
            self._state,
            q_norm,
            k_norm,
            heads=mixer.n_heads,
            key_width=mixer.key_width,
            joint=joint,
            coefficients=mixer.coefficients,
            scale=mixer.key_width**-0.5,
            eps=mixer.eps,
        )
        return linear_step(o, mixer.proj_o.weight, residual=x)

    @cached_property
    def _qkv(self) -> Tensor:
        """The weights of all three projections [2HK + HV, D], copied once: one product is faster than three."""
        layers = (self._mixer.proj_q, self._mixer.proj_k, self._mixer.proj_v)
        with torch.no_grad():
            return torch.cat([layer.weight for layer in layers])


def _products(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Return scale * (q . k) of every pair: q, k [B,T,H,K] -> [B,H,T,T], in fp32 (fp64 for fp64)."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    return scale * torch.einsum("bihk,bjhk->bhij", q.to(dtype), k.to(dtype))


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
            similarity is negative. They begin as Based's. On a GPU "learned" takes the chunked path.
        eps: added to the sum of similarities that divides each output. Default 1e-12.
        backend: "auto" (default): Triton kernels on a GPU, chunked torch elsewhere. "triton", "chunked", "recurrent"
            or "reference" (the equation, quadratic in T) choose one.
        device, dtype: where and in which dtype weights are made, as in torch.nn.Linear.

    torch.func (vmap, grad, ...) works with backend="reference" or "recurrent". torch.compile works with fullgraph=True.

    Example:
        >>> layer = ReBased(d_model=768, n_heads=12, key_width=16)
        >>> y = layer(torch.randn(2, 1024, 768))                             # [2, 1024, 768]
        >>> state = layer.init_state(batch=2)
        >>> y, state = layer.extend(torch.randn(2, 1000, 768), state)        # prefill
        >>> y, state = layer.extend(torch.randn(2, 1, 768), state)           # decode one token
    """

    coefficients = REBASED
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
        super().__init__(d_model, n_heads, key_width, value_width, eps, backend, device, dtype)
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
        """Return (0, 0, 1), or the learnt coefficients as a tensor [3] in at least fp32."""
        if self.kernel_logits is None:
            return self.coefficients
        logits = self.kernel_logits.to(torch.promote_types(self.kernel_logits.dtype, torch.float32))
        c0, c2 = nn.functional.softplus(logits[0]), nn.functional.softplus(logits[2])
        return torch.stack([c0, 2 * (c0 * c2).sqrt() * logits[1].sigmoid(), c2])

    def transform(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return q and k [B,T,H*K], each after its transform (`qk_transform`, `norm_axis`)."""
        heads = (self.n_heads, self.key_width)
        if self.norm_axis == "per_head":
            q, k = self.ln_q(q.unflatten(-1, heads)).flatten(-2), self.ln_k(k.unflatten(-1, heads)).flatten(-2)
        else:
            q, k = self.ln_q(q), self.ln_k(k)
        if self.kernel != "fourth":
            return q, k
        return pair_products(q.unflatten(-1, heads)).flatten(-2), pair_products(k.unflatten(-1, heads)).flatten(-2)

    def project_qk(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the q and k of x after their transform: [B,T,D] -> [B,T,H*K] each.

        The paper's joint LayerNorm is computed together with its projection, unless a user has put a module of another
        class, or one with hooks, in the place of either.
        """
        pairs = ((self.proj_q, self.ln_q), (self.proj_k, self.ln_k))
        plain = all(is_plain(nn.Linear, proj) and is_plain(AffineNorm, norm) for proj, norm in pairs)
        if not plain or not self.ln_q.is_layer_norm or self.norm_axis != "joint" or self.kernel == "fourth":
            return super().project_qk(x)
        q, k = (linear_layer_norm(x, proj.weight, norm.weight, norm.bias, norm.eps) for proj, norm in pairs)
        return q, k

    def fuses_steps(self) -> bool:
        """Return True if `poly_step_` computes this mixer: the square of layer- or rms-normalised q . k."""
        return super().fuses_steps() and self.kernel == "square" and self.norm in ("layer", "rms")

    def qk_norms(self) -> tuple[Norm | None, Norm | None, bool]:
        """Return the norms of q and k as numbers, and whether all heads are normalised together."""
        return self.ln_q.as_norm(), self.ln_k.as_norm(), self.norm_axis == "joint"

    def qk_parameters(self) -> dict[str, Tensor]:
        """Return gamma and beta of q and k by name, those that there are: {"q.gamma": [H*K], "q.beta": ..., ...}.

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
        return _products(q, k, self.key_width**-0.5)

    def extra_repr(self) -> str:
        return (
            f"{super().extra_repr()}, qk_transform={self.qk_transform!r}, norm_axis={self.norm_axis!r}, "
            f"norm={self.norm!r}, kernel={self.kernel!r}"
        )


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

    torch.func (vmap, grad, ...) works with backend="reference" or "recurrent". torch.compile works with fullgraph=True.

    Example:
        >>> layer = Based(d_model=768)
        >>> y = layer(torch.randn(2, 1024, 768))                             # [2, 1024, 768]
        >>> y, state = layer.extend(torch.randn(2, 1000, 768), layer.init_state(batch=2))
    """

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
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(d_model, n_heads, key_width, value_width, eps, backend, device, dtype)
