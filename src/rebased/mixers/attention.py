"""Softmax attention: the quadratic mixer that the others are measured against. Its state, a KV cache, grows."""

import inspect
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from rebased.mixers.attention_maps import scaled_products, softmax_map, weigh
from rebased.mixers.checks import check_input, is_plain
from rebased.mixers.contract import named_arguments, register_mixer
from rebased.mixers.documents import document_numbers, start_numbers
from rebased.mixers.rotary import rotary_angles, rotate
from rebased.mixers.slots import grown
from rebased.ops import Norm, linear_step, rms_norm
from rebased.ops.backend import to_device

NORM_EPS = 1e-5  # of the norm of q and k


class KVCache(NamedTuple):
    """The state of SoftmaxAttention: keys, rotated if it is rotary, and values of the t tokens seen so far."""

    k: Tensor  # [B, t, H, W]
    v: Tensor  # [B, t, H, W]


class QKVAttention(nn.Module):
    """What attention to all tokens and to a window share: one projection to q, k and v, an empty cache, its matrix."""

    added_later: tuple[str, ...] = ("out_bias", "qk_norm", "rotary")
    residual_projections: tuple[str, ...] = ("out_proj",)
    output_projection = "out_proj"
    spreads_nan = "torch's attention multiplies masked values by zero, and zero times NaN is NaN"
    cache: Callable[[Tensor, Tensor], Any] = KVCache
    """The class of the state, made of k and v."""

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: int = 1,
        qkv_bias: bool = True,
        out_bias: bool = True,
        qk_norm: bool = False,
        rotary: bool = False,
        dropout: float = 0.1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if n_heads < 1 or d_model % n_heads:
            raise ValueError(f"d_model {d_model} is not divisible by n_heads {n_heads}; choose n_heads that divides it")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout {dropout} is not a probability below 1")
        width = d_model // n_heads
        if rotary and width % 2:
            raise ValueError(f"rotary rotates pairs of features; a head of {width} is odd: change n_heads")
        self.d_model, self.n_heads, self.qkv_bias, self.out_bias = d_model, n_heads, qkv_bias, out_bias
        self.qk_norm, self.rotary, self.dropout = qk_norm, rotary, dropout
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=qkv_bias, device=device, dtype=dtype)
        self.out_proj = nn.Linear(d_model, d_model, bias=out_bias, device=device, dtype=dtype)
        self.q_norm = self.k_norm = None
        if qk_norm:
            self.q_norm = nn.RMSNorm(width, eps=NORM_EPS, device=device, dtype=dtype)
            self.k_norm = nn.RMSNorm(width, eps=NORM_EPS, device=device, dtype=dtype)

    def init_state(self, batch: int, *, device: torch.device | None = None, dtype: torch.dtype | None = None) -> Any:
        """Return the empty cache before the first token: k and v [B,0,H,W]."""
        weight, shape = self.qkv.weight, (batch, 0, self.n_heads, self.d_model // self.n_heads)
        k, v = (torch.zeros(shape, device=device or weight.device, dtype=dtype or weight.dtype) for _ in range(2))
        return self.cache(k, v)

    def apply_attention(self, attention: Tensor, x: Tensor) -> Tensor:
        """Return the output [B,T,D] for x [B,T,D] if the matrix were `attention` [B,H,T,T]."""
        return self.out_proj(weigh(attention, self._project(x)[2]).flatten(-2))

    def attention_scores(self, x: Tensor) -> Tensor:
        """Return s = q . k / sqrt(W) of every pair: x [B,T,D] -> [B,H,T,T], in fp32 (fp64 for fp64)."""
        q, k = self._rotated(*self._project(x)[:2])
        return scaled_products(q, k, q.shape[3] ** -0.5)

    def similarity(self, scores: Tensor) -> Tensor:
        """Return exp(s) of scores s: any shape -> the same shape."""
        return scores.exp()

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        check_input(self, x, self.qkv.weight)
        q, k, v = self.qkv(x).unflatten(-1, (3, self.n_heads, -1)).unbind(2)  # each [B,T,H,W]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = rms_norm(q, self.q_norm.weight, NORM_EPS), rms_norm(k, self.k_norm.weight, NORM_EPS)
        return q, k, v

    def _rotated(self, q: Tensor, k: Tensor, past: int = 0) -> tuple[Tensor, Tensor]:
        """Return q [B,T,H,W] and k [B,S,H,W] as their products are taken; q are the last T of the S tokens.

        `past` tokens come before the first of k.
        """
        if not self.rotary:
            return q, k
        angles = rotary_angles(past + k.shape[1], k.shape[3], k.device)[past:]
        return rotate(q, angles[k.shape[1] - q.shape[1] :]), rotate(k, angles)

    def extra_repr(self) -> str:
        return named_arguments(self)


@register_mixer("attention")
class SoftmaxAttention(QKVAttention):
    """Causal multi-head softmax attention through torch's fused kernels; one projection makes q, k and v.

    Maps x [B,T,D] to [B,T,D] and never looks ahead. Time is quadratic in T; the state is a KV cache and grows with the
    sequence. Without `rotary` it knows no positions: the model adds learned ones to the embeddings.
    W = d_model / n_heads.

    Args:
        d_model: width D of x.
        n_heads: number of heads H; must divide d_model. Default 1.
        qkv_bias: whether the projection to q, k and v has a bias. Default True.
        out_bias: whether the output projection has a bias. Default True.
        qk_norm: whether q and k are normalised in each head, by an RMSNorm of their own. Default False.
        rotary: whether q and k are rotated by their positions (needs an even W). Default False.
        dropout: probability with which attention weights are dropped in training, in [0, 1). Default 0.1.
        device, dtype: where and in which dtype weights are made, as in torch.nn.Linear.

    torch.func (vmap, grad, ...) works. torch.compile works with fullgraph=True.

    Example:
        >>> layer = SoftmaxAttention(d_model=768, n_heads=12)
        >>> y = layer(torch.randn(2, 1024, 768))                             # [2, 1024, 768]
        >>> y, cache = layer.extend(torch.randn(2, 1000, 768), layer.init_state(batch=2))
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return causal attention over time: x [B,T,D] -> [B,T,D]."""
        q, k, v = self._project(x)
        return self._attend(*self._rotated(q, k), v)

    def forward_documents(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Return forward() of each packed document by itself: x [B,T,D], cu_seqlens [n+1] -> [B,T,D].

        It uses a mask [B,1,T,T], so the cost does not depend on how many documents there are. Rotary positions count
        from the first token of the row: attention depends on distances only.
        """
        q, k, v = self._project(x)
        q, k = self._rotated(q, k)
        documents = document_numbers(cu_seqlens, x.shape[0] * x.shape[1]).view(x.shape[0], 1, -1)  # [B,1,T]
        return self._attend(q, k, v, mask=(documents.unsqueeze(3) == documents.unsqueeze(2)).tril())

    def extend(self, x: Tensor, state: KVCache) -> tuple[Tensor, KVCache]:
        """Return (y [B,T,D], cache after x): forward() of tokens x [B,T,D] that follow those in the cache."""
        q, k, v = self._project(x)
        if not isinstance(state, KVCache) or state.k.shape[0] != x.shape[0] or state.k.shape[2:] != k.shape[2:]:
            shape = list(state.k.shape) if isinstance(state, KVCache) else type(state).__name__
            raise ValueError(
                f"this state is of another shape: {shape}; x {list(x.shape)} needs a KVCache of "
                f"{[x.shape[0], 't', *k.shape[2:]]}"
            )
        q, k = self._rotated(q, k, state.k.shape[1])
        if state.k.shape[1] == 0:  # a prompt from its beginning: torch's causal kernels need no mask
            return self._attend(q, k, v), KVCache(k, v)
        k, v = torch.cat([state.k, k], dim=1), torch.cat([state.v, v], dim=1)
        return self._attend_after(q, k, v), KVCache(k, v)

    def extend_caches(self, x: Tensor, lengths: Sequence[int], states: Sequence[KVCache]) -> tuple[Tensor, list[Any]]:
        """Return (y [1,N,D], caches after x): `extend` of each packed document by itself, up to rounding.

        x [1,N,D] are documents of these lengths, and each follows the tokens in its own cache of one row.
        """
        q, k, v = self._project(x)
        before = [state.k.shape[1] for state in states]
        totals = [past + length for past, length in zip(before, lengths, strict=True)]
        if self.rotary:
            places = chain.from_iterable(map(range, before, totals))
            angles = rotary_angles(max(totals), k.shape[3], k.device)[to_device(list(places), torch.int64, k.device)]
            q, k = rotate(q, angles), rotate(k, angles)
        k, v = k.contiguous(), v.contiguous()  # caches that are kept hold no queries
        caches = list(map(KVCache, k.split(list(lengths), dim=1), v.split(list(lengths), dim=1)))
        if any(before):
            pairs = zip(states, caches, strict=True)
            caches = [KVCache(*(torch.cat(two, dim=1) for two in zip(*pair, strict=True))) for pair in pairs]
            k, v = (torch.cat(each, dim=1) for each in zip(*caches, strict=True))
        if self._packs(q):
            return self._attend_packed(q, k, v, lengths, totals), caches
        each = zip(q.split(list(lengths), dim=1), caches, strict=True)
        return torch.cat([self._attend_after(some, *cache) for some, cache in each], dim=1), caches

    def init_slots(self, count: int, capacity: int) -> "KVSlots":
        """Return empty caches for `count` sequences of at most `capacity` tokens, for decoding (mixers/slots.py)."""
        k, v = (grown(each.transpose(1, 2), capacity, 2) for each in self.init_state(count))
        plain = self.q_norm is None and not self.rotary
        fuses = type(self) is SoftmaxAttention and plain and is_plain(nn.Linear, self.qkv, self.out_proj)
        return (FusedKVSlots if fuses else KVSlots)(self, k, v)

    def attention_map(self, x: Tensor) -> Tensor:
        """Return the attention matrix without dropout: x [B,T,D] -> [B,H,T,T] (mixers/attention_maps.py)."""
        scores = self.attention_scores(x)
        return softmax_map(scores, torch.ones(scores.shape[2:], dtype=torch.bool, device=x.device).tril())

    def state_size(self, seq_len: int) -> int:
        """Return how many numbers the cache of one sequence holds after seq_len tokens: 2 seq_len D."""
        return 2 * seq_len * self.d_model

    def _attend_after(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return attention [B,T,D] of q [B,T,H,W], the queries of the last T of the S tokens of k, v [B,S,H,W]."""
        T, S = q.shape[1], k.shape[1]
        if T == S:
            return self._attend(q, k, v)
        if q.shape[0] == 1 and self._packs(q):
            return self._attend_packed(q, k, v, [T], [S])
        return self._attend(q, k, v, mask=torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T))

    def _packs(self, q: Tensor) -> bool:
        return can_pack(q) and not torch.is_grad_enabled() and not (self.training and self.dropout)

    def _attend_packed(self, q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], totals: Sequence[int]) -> Tensor:
        """Return attention [1,N,D] of packed documents: q [1,N,H,W] of the last tokens of k, v [1,S,H,W].

        A document has `totals` tokens and queries of the last `lengths` of them. No mask takes memory.
        """
        starts, attend = (start_numbers(each, q.device) for each in (lengths, totals)), packed_attention()
        assert attend is not None
        o = attend(q[0], k[0], v[0], *starts, max(lengths), max(totals), window_size=(-1, 0))
        return self.out_proj(o.flatten(-2).unsqueeze(0))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return attention [B,T,D], causal if there is no mask."""
        o = functional.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=mask is None,
        )
        return self.out_proj(o.transpose(1, 2).flatten(-2))


@cache
def packed_attention() -> Callable[..., Any] | None:
    """Return torch's attention to packed documents; None before torch 2.11. Imported late: it imports the compiler."""
    with suppress(ImportError):
        from torch.nn.attention.varlen import varlen_attn

        if "window_size" in inspect.signature(varlen_attn).parameters:
            return varlen_attn
    return None


def can_pack(x: Tensor) -> bool:
    """Return True if torch's flash attention reads packed documents with heads like these, [..., W]."""
    if not x.is_cuda or x.dtype not in (torch.bfloat16, torch.float16) or x.shape[-1] % 8 or x.shape[-1] > 256:
        return False
    return torch.cuda.get_device_capability(x.device) >= (8, 0) and packed_attention() is not None


class KVSlots:
    """KV caches of a fixed capacity for sequences of different lengths: k and v [count,H,capacity,W]."""

    grows = True

    def __init__(self, mixer: SoftmaxAttention, k: Tensor, v: Tensor) -> None:
        self._mixer, self.k, self.v = mixer, k, v
        self._rows = torch.arange(k.shape[0], device=k.device)
        self.reads_long = can_pack(k)

    def put(self, slot: int, state: KVCache, length: int) -> None:
        """Copy the cache of one sequence, k and v [1,length,H,W], into a slot."""
        self.k[slot, :, :length].copy_(state.k[0].transpose(0, 1))
        self.v[slot, :, :length].copy_(state.v[0].transpose(0, 1))

    def first(self, count: int) -> "KVSlots":
        """Return the first slots: what their steps write is written here."""
        return type(self)(self._mixer, self.k[:count], self.v[:count])

    def get(self, slot: int, length: int) -> KVCache:
        """Return a copy of the cache in a slot, k and v [1,length,H,W]."""
        k, v = (each[slot : slot + 1, :, :length].transpose(1, 2) for each in (self.k, self.v))
        return KVCache(*(each.clone(memory_format=torch.contiguous_format) for each in (k, v)))

    def step(self, x: Tensor, lengths: Tensor, longest: int) -> Tensor:
        """Return attention [count,1,D] of one more token per slot to its own past, and add it to the caches."""
        q, k, v = (each.transpose(1, 2) for each in self._mixer._project(x))  # [count,H,1,W]
        if self._mixer.rotary:
            angles = rotary_angles(longest, q.shape[3], q.device)[lengths].unsqueeze(1)  # [count,1,W/2]
            q, k = rotate(q, angles), rotate(k, angles)
        return self._mixer.out_proj(self._attend(q, k, v, lengths, longest).transpose(1, 2).flatten(-2))

    def reserve(self, capacity: int) -> None:
        """Make room for sequences of `capacity` tokens."""
        if capacity > self.k.shape[2]:
            self.k, self.v = grown(self.k, capacity, 2), grown(self.v, capacity, 2)

    def tensors(self) -> list[Tensor]:
        """Return the caches."""
        return [self.k, self.v]

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, longest: int) -> Tensor:
        """Add k and v to the caches; return attention, all [count,H,1,W]."""
        self.k[self._rows, :, lengths] = k[:, :, 0].to(self.k.dtype)
        self.v[self._rows, :, lengths] = v[:, :, 0].to(self.v.dtype)
        seen = torch.arange(longest, device=q.device) <= lengths.unsqueeze(1)  # [count,longest]
        return functional.scaled_dot_product_attention(
            q, self.k[:, :, :longest], self.v[:, :, :longest], attn_mask=seen[:, None, None]
        )


class FusedKVSlots(KVSlots):
    """KV caches whose step computes norm and projections in one kernel, and output projection and residual in one."""

    def step_fused(self, x: Tensor, norm: Norm, lengths: Tensor, longest: int) -> Tensor:
        """Return x + mixer(norm(x)) [count,D] of one more token x [count,D] per slot, and add it to the caches."""
        qkv, out = self._mixer.qkv, self._mixer.out_proj
        made = linear_step(x, qkv.weight, qkv.bias, norm=norm).unflatten(-1, (3, self._mixer.n_heads, 1, -1))
        q, k, v = made.unbind(1)  # [count,H,1,W]
        o = self._attend(q, k, v, lengths, longest)
        return linear_step(o.flatten(1), out.weight, out.bias, residual=x)
