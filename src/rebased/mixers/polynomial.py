"""What ReBased and Based share: linear attention whose similarity is a second-degree polynomial of q . k."""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from rebased.mixers.attention_maps import scaled_products, weigh
from rebased.mixers.checks import check_input, empty_output, is_plain
from rebased.mixers.contract import named_arguments, rows_at
from rebased.mixers.slots import FixedSlots
from rebased.ops import (
    AnyCoefficients,
    Backend,
    Coefficients,
    Norm,
    PolyState,
    feature_count,
    init_poly_state,
    linear_step,
    poly_at_pays,
    poly_attention,
    poly_attention_at,
    poly_attention_extend,
    poly_attention_extend_,
    poly_attention_map,
    poly_step_,
)


class PolynomialAttention(nn.Module):
    """Base class of ReBased and Based: four projections without biases around one operator, `poly_attention`.

    A subclass sets `coefficients` (c0, c1, c2): the similarity of a query and a key is c0 + c1 s + c2 s^2,
    s = q . k / sqrt(key_width). The weights are proj_q, proj_k [H*K, D], proj_v [H*V, D] and proj_o [D, H*V].
    """

    coefficients: Coefficients
    scale: float | None = None  # of q . k in the operator; None: operator_width ** -0.5
    output_projection = "proj_o"
    residual_projections: tuple[str, ...] = ()  # proj_o starts at N(0, 0.02) like the others, as in the paper's runs

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

    def project_queries(self, x: Tensor) -> Tensor:
        """Return the q of x as the kernel needs them: [B,T,D] -> [B,T,H*K]. ReBased normalises them."""
        return self.proj_q(x)

    def project_keys(self, x: Tensor) -> Tensor:
        """Return the k of x as the kernel needs them: [B,T,D] -> [B,T,H*K]."""
        return self.proj_k(x)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the q, k [B,T,H,K] and v [B,T,H,V] that the operator is called with, from x [B,T,D]."""
        check_input(self, x, self.proj_q.weight)
        keys, values = (self.n_heads, self.operator_width), (self.n_heads, self.value_width)
        v = self.proj_v(x).unflatten(-1, values)
        return self.project_queries(x).unflatten(-1, keys), self.project_keys(x).unflatten(-1, keys), v

    def _kernel(self) -> dict[str, Any]:
        """Return the arguments of the operator that define the similarity."""
        return {"coefficients": self.operator_coefficients(), "scale": self.scale, "eps": self.eps}

    def gates(self, x: Tensor) -> dict[str, Any]:
        """Return the operator's arguments that depend on x [B,T,D], each [B,T,H]. Here there are none (gated.py)."""
        return {}

    def attend(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None = None, **gates: Any) -> Tensor:
        """Return o [B,T,H,V] of what `project` and `gates` return."""
        return poly_attention(q, k, v, **self._kernel(), **gates, cu_seqlens=cu_seqlens, backend=self.backend)

    def forward(self, x: Tensor) -> Tensor:
        """Return causal attention over time: x [B,T,D] -> [B,T,D], time and memory linear in T.

        x has the dtype and device of the weights; under autocast any floating dtype. B and T may be 0.
        """
        q, k, v = self.project(x)
        if x.numel() == 0:
            return empty_output(self, x)
        return self.proj_o(self.attend(q, k, v, **self.gates(x)).flatten(-2))

    def attends_at(self, x: Tensor, n: int) -> bool:
        """Return True if forward_at of n positions per row is faster than forward of x [B,T,D] (mixers/contract.py).

        It is faster on a GPU. False if a subclass or a hook changes the mixer: forward_at would ignore that.
        """
        plain = self.fuses_steps() and is_plain(type(self), self)
        return plain and poly_at_pays(
            x, n, self.operator_width, self.value_width, coefficients=self.coefficients, backend=self.backend
        )

    def forward_at(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return forward() at these positions only: x [B,T,D], positions [B,n] -> [B,n,D]. Queries and outputs of other
        positions are not computed; see attends_at."""
        check_input(self, x, self.proj_q.weight)
        keys, values = (self.n_heads, self.operator_width), (self.n_heads, self.value_width)
        k, v = self.project_keys(x).unflatten(-1, keys), self.proj_v(x).unflatten(-1, values)
        q = self.project_queries(rows_at(x, positions)).view(*positions.shape, *keys)
        o = poly_attention_at(q, k, v, positions, **self._kernel(), **self.gates(x), backend=self.backend)
        return self.proj_o(o.flatten(-2))

    def forward_documents(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Return forward() of each packed document by itself: x [B,T,D] -> [B,T,D] (mixers/documents.py).

        cu_seqlens [n+1], int32 or int64, says where documents begin in the B*T tokens; its last number is B*T.
        """
        tokens = x.reshape(1, -1, x.shape[2])  # [1,B*T,D]
        q, k, v = self.project(tokens)
        y = self.proj_o(self.attend(q, k, v, cu_seqlens, **self.gates(tokens)).flatten(-2))
        return y.view(*x.shape[:2], -1)  # before an output gate it is heads, H*V wide (wrapper.py)

    def init_state(
        self, batch: int, *, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> PolyState:
        """Return the state before the first token: PolyState(kv [B,H,F,V], z [B,H,F]), all zeros.

        F is the number of features of a key: K (K + 1) / 2 for ReBased, 1 + K + K (K + 1) / 2 for Based. The state is
        fp32 (fp64 for fp64).
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
        o, state = poly_attention_extend(q, k, v, state, **self._kernel(), **self.gates(x), backend=self.backend)
        return self.proj_o(o.flatten(-2)), state

    def extend_documents(self, x: Tensor, cu_seqlens: Tensor, state: PolyState) -> tuple[Tensor, PolyState]:
        """Return (y [1,N,D], state after x): extend() of each packed document by itself (mixers/documents.py)."""
        q, k, v = self.project(x)
        given = {**self._kernel(), **self.gates(x), "cu_seqlens": cu_seqlens, "backend": self.backend}
        o, state = poly_attention_extend(q, k, v, state, **given)
        return self.proj_o(o.flatten(-2)), state

    def extend_(self, x: Tensor, state: PolyState) -> Tensor:
        """Return y [B,1,D] of `extend` for one token x [B,1,D], and overwrite the state by the one after it.

        A step of decoding reads and writes the state once, and allocates nothing of its size. There are no gradients.
        """
        q, k, v = self.project(x)
        o = poly_attention_extend_(q, k, v, state, **self._kernel(), **self.gates(x), backend=self.backend)
        return self.proj_o(o.flatten(-2))

    @property
    def slots_class(self) -> type[FixedSlots]:
        """Slots with fused steps; plain slots if a subclass or a hook changes the mixer (mixers/slots.py)."""
        return PolynomialSlots if self.fuses_steps() else FixedSlots

    def fuses_steps(self) -> bool:
        """Return True if `poly_step_` computes this mixer: its class says so itself, and its layers are plain.

        A class that inherits may compute something else, so it does not inherit `has_fused_step`.
        """
        layers = (self.proj_q, self.proj_k, self.proj_v)
        known = not isinstance(self.operator_coefficients(), Tensor) and self.backend in ("auto", "triton")
        last = is_plain(nn.Linear, self.proj_o) or is_plain(nn.Identity, self.proj_o)  # Identity: before an output gate
        return known and "has_fused_step" in vars(type(self)) and last and is_plain(nn.Linear, *layers)

    def step_gates(self, x: Tensor, norm: Norm | None) -> dict[str, Tensor]:
        """Return the arguments of `poly_step_` that depend on norm(x), x [S,D]: each [S,H]. Here there are none."""
        return {}

    def qk_norms(self) -> tuple[Norm | None, Norm | None, bool]:
        """Return the norms of q and k as numbers, and whether all heads are normalised together. Here there is none."""
        return None, None, True

    def attention_map(self, x: Tensor) -> Tensor:
        """Return the attention matrix, computed again from q and k: x [B,T,D] -> [B,H,T,T] (mixers/attention_maps.py).

        Row i sums to den / (den + eps), den being the sum of its similarities.
        """
        q, k, _ = self.project(x)
        return poly_attention_map(q, k, **self._kernel(), **self.gates(x))

    def apply_attention(self, attention: Tensor, x: Tensor) -> Tensor:
        """Return the output [B,T,D] for x [B,T,D] if the matrix were `attention` [B,H,T,T]."""
        return self.proj_o(weigh(attention, self.project(x)[2]).flatten(-2))

    def attention_scores(self, x: Tensor) -> Tensor:
        """Return the operator's s of every pair, q . k / sqrt(K): x [B,T,D] -> [B,H,T,T], in fp32 (fp64 for fp64)."""
        q, k, _ = self.project(x)
        return scaled_products(q, k, self.operator_width**-0.5 if self.scale is None else self.scale)

    def similarity(self, scores: Tensor) -> Tensor:
        """Return c0 + c1 s + c2 s^2 of scores s: any shape -> the same shape."""
        c0, c1, c2 = self.operator_coefficients()
        return c0 + scores * (c1 + c2 * scores)

    def state_size(self, seq_len: int) -> int:
        """Return how many numbers the state of one sequence holds: H F (V + 1), whatever seq_len is."""
        features = feature_count(self.operator_width, self.operator_coefficients())
        return self.n_heads * features * (self.value_width + 1)

    def extra_repr(self) -> str:
        return named_arguments(self)


class PolynomialSlots(FixedSlots):
    """Slots whose step is three kernels: norm and projections, the operator with the norms of q and k, the output."""

    def step_fused(self, x: Tensor, norm: Norm, lengths: Tensor, longest: int) -> Tensor:
        """Return x + mixer(norm(x)) [count,D] of one more token x [count,D] per slot, and overwrite the states."""
        return self.project_heads(self.step_heads(x, norm, lengths, longest), x)

    def project_heads(self, o: Tensor, residual: Tensor) -> Tensor:
        """Return residual [count,D] plus the last projection of heads o [count,H*V]."""
        return linear_step(o, self._mixer.proj_o.weight, residual=residual)

    def step_heads(self, x: Tensor, norm: Norm | None, lengths: Tensor, longest: int) -> Tensor:
        """Return the heads [count,H*V] of one more token norm(x), x [count,D], per slot, and overwrite the states."""
        mixer = self._mixer
        q_norm, k_norm, joint = mixer.qk_norms()
        return poly_step_(
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
            **mixer.step_gates(x, norm),
        )

    @cached_property
    def _qkv(self) -> Tensor:
        """The weights of all three projections [2HK + HV, D], copied once: one product is faster than three."""
        layers = (self._mixer.proj_q, self._mixer.proj_k, self._mixer.proj_v)
        with torch.no_grad():
            return torch.cat([layer.weight for layer in layers])
