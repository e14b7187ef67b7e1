"""Softmax attention: the quadratic mixer the others are measured against. Its state is a KV cache and grows."""

import sys
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from rebased.mixers.contract import Earlier, register_mixer
from rebased.mixers.documents import document_numbers
from rebased.mixers.parts import tokens_before


class KVCache(NamedTuple):
    k: Tensor  # [B, t, H, W]  t tokens seen
    v: Tensor  # [B, t, H, W]


@register_mixer("attention")
class SoftmaxAttention(nn.Module):
    """Causal softmax attention through torch's fused kernels, one projection for q, k and v."""

    def __init__(self, d_model: int, *, n_heads: int = 1, qkv_bias: bool = True, dropout: float = 0.1) -> None:
        super().__init__()
        if n_heads < 1 or d_model % n_heads:
            raise ValueError(f"d_model {d_model} is not divisible by n_heads {n_heads}; choose n_heads that divides it")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout {dropout} is not a probability below 1")
        self.n_heads, self.dropout = n_heads, dropout
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=qkv_bias)
        self.out_proj = nn.Linear(d_model, d_model)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self._project(x)
        return self._attend(q, k, v, mask=None)

    def forward_documents(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Through a mask [B,1,T,T]: no slower the more documents there are, and no faster."""
        q, k, v = self._project(x)
        documents = document_numbers(cu_seqlens, x.shape[0] * x.shape[1]).view(x.shape[0], 1, -1)  # [B,1,T]
        return self._attend(q, k, v, mask=(documents.unsqueeze(3) == documents.unsqueeze(2)).tril())

    def forward_part(self, x: Tensor, earlier: Earlier) -> Tensor:
        """Every part is told all earlier keys and values: a message that grows with the sequence."""
        q, k, v = self._project(x)
        past = tokens_before(torch.cat([k, v], dim=-1), earlier, count=sys.maxsize)  # [B,s,H,2W]
        past_k, past_v = past.chunk(2, dim=-1)
        return self._attend_after(q, torch.cat([past_k, k], dim=1), torch.cat([past_v, v], dim=1))

    def init_state(
        self, batch: int, *, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> KVCache:
        weight = self.out_proj.weight
        empty = torch.empty(
            batch,
            0,
            self.n_heads,
            weight.shape[0] // self.n_heads,
            device=device or weight.device,
            dtype=dtype or weight.dtype,
        )
        return KVCache(empty, empty)

    def extend(self, x: Tensor, state: KVCache) -> tuple[Tensor, KVCache]:
        q, k, v = self._project(x)
        if not isinstance(state, KVCache) or state.k.shape[0] != x.shape[0] or state.k.shape[2:] != k.shape[2:]:
            shape = list(state.k.shape) if isinstance(state, KVCache) else type(state).__name__
            raise ValueError(
                f"this state is of another shape: {shape}; these inputs need a KVCache of "
                f"{[x.shape[0], 't', *k.shape[2:]]}"
            )
        k, v = torch.cat([state.k, k], dim=1), torch.cat([state.v, v], dim=1)
        return self._attend_after(q, k, v), KVCache(k, v)

    def state_size(self, seq_len: int) -> int:
        return 2 * seq_len * self.out_proj.weight.shape[0]

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.n_heads, -1)).unbind(2)  # each [B,T,H,W]
        return q, k, v

    def _attend_after(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The queries are the last of the tokens whose keys are given."""
        T, S = q.shape[1], k.shape[1]
        return self._attend(q, k, v, mask=torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        o = functional.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=mask is None,
        )
        return self.out_proj(o.transpose(1, 2).flatten(-2))
