"""Sliding-window attention: softmax over the last few tokens. Time is linear in T; the state has at most one window."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from rebased.mixers.attention import QKVAttention
from rebased.mixers.attention_maps import softmax_map
from rebased.mixers.checks import check_input, check_state
from rebased.mixers.contract import register_mixer
from rebased.mixers.documents import document_numbers
from rebased.mixers.rotary import rotary_angles, rotate
from rebased.mixers.slots import grown


class WindowCache(NamedTuple):
    """The state of SlidingWindow: keys and values of the last s <= window - 1 tokens, in the dtype of x.

    Keys are stored before rotation. Rotary attention depends on distances only, so positions may count from the first
    token of the cache.
    """

    k: Tensor  # [B, s, H, W]
    v: Tensor  # [B, s, H, W]


@register_mixer("sliding_window")
class SlidingWindow(QKVAttention):
    """Causal multi-head softmax attention in which a token sees itself and the window - 1 tokens before it.

    Maps x [B,T,D] to [B,T,D]. Time is linear in T; the state is a KV cache of at most window - 1 tokens.
    W = d_model / n_heads.

    Args:
        d_model: width D of x.
        window: how many tokens each token sees, itself included; at least 1. Default 64.
        n_heads: number of heads H; must divide d_model. Default 1.
        rotary: whether q and k are rotated by their positions (needs an even W). Default False.
        qkv_bias: whether the projection to q, k and v has a bias. Default True.
        out_bias: whether the output projection has a bias. Default True.
        qk_norm: whether q and k are normalised in each head, by an RMSNorm of their own. Default False.
        dropout: probability with which attention weights are dropped in training, in [0, 1). Default 0.1.
        device, dtype: where and in which dtype weights are made, as in torch.nn.Linear.

    torch.func (vmap, grad, ...) works.

    Example:
        >>> layer = SlidingWindow(d_model=768, window=128, n_heads=12)
        >>> y = layer(torch.randn(2, 1024, 768))                             # [2, 1024, 768]
        >>> y, cache = layer.extend(torch.randn(2, 1000, 768), layer.init_state(batch=2))
    """

    added_later = ("out_bias", "qk_norm")
    cache = WindowCache

    def __init__(
        self,
        d_model: int,
        *,
        window: int = 64,
        n_heads: int = 1,
        rotary: bool = False,
        qkv_bias: bool = True,
        out_bias: bool = True,
        qk_norm: bool = False,
        dropout: float = 0.1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            d_model, n_heads=n_heads, qkv_bias=qkv_bias, out_bias=out_bias, qk_norm=qk_norm, rotary=rotary,
            dropout=dropout, device=device, dtype=dtype,
        )  # fmt: skip
        if window < 1:
            raise ValueError(f"window {window} sees nothing; choose at least 1, the token itself")
        self.window = window

    def forward(self, x: Tensor) -> Tensor:
        """Return causal attention within the window: x [B,T,D] -> [B,T,D]."""
        check_input(self, x, self.qkv.weight)
        return self.extend(x, self.init_state(x.shape[0], device=x.device, dtype=x.dtype))[0]

    def forward_documents(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Return forward() of each packed document by itself: x [B,T,D], cu_seqlens [n+1] -> [B,T,D]."""
        documents = document_numbers(cu_seqlens, x.shape[0] * x.shape[1]).view(x.shape[:2])  # [B,T]
        return self._attend_after(*self._project(x), documents)

    def extend(self, x: Tensor, state: WindowCache) -> tuple[Tensor, WindowCache]:
        """Return (y [B,T,D], cache after x): forward() of tokens x [B,T,D] that follow those the cache has seen."""
        q, k, v = self._project(x)
        self._check_state(state, k)
        k, v = torch.cat([state.k.to(k.dtype), k], dim=1), torch.cat([state.v.to(v.dtype), v], dim=1)
        first = max(0, k.shape[1] - (self.window - 1))  # the first token that later ones may see
        after = WindowCache(k[:, first:], v[:, first:])
        return self._attend_after(q, k, v), after

    def init_slots(self, count: int, capacity: int) -> "WindowSlots":
        """Return empty caches of one window for `count` sequences of any length, for decoding (mixers/slots.py)."""
        return WindowSlots(self, *(grown(each.transpose(1, 2), self.window, 2) for each in self.init_state(count)))

    def attention_map(self, x: Tensor) -> Tensor:
        """Return the attention matrix without dropout, zero outside the window: x [B,T,D] -> [B,H,T,T]."""
        T = x.shape[1]
        return softmax_map(self.attention_scores(x), _band(T, T, 0, self.window, x.device))

    def state_size(self, seq_len: int) -> int:
        """Return how many numbers the cache of one sequence holds: 2 min(seq_len, window - 1) D."""
        return 2 * min(seq_len, self.window - 1) * self.d_model

    def _attend_after(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        """Return attention [B,T,D] of q [B,T,H,W], the queries of the last T of the S tokens of k, v [B,S,H,W]."""
        q, k = self._rotated(q, k)
        o = local_attention(q, k, v, self.window, self.dropout if self.training else 0.0, documents)
        return self.out_proj(o.flatten(-2))

    def _check_state(self, state: WindowCache, k: Tensor) -> None:
        check_state(state, WindowCache)
        B, s, *head = state.k.shape
        if k.shape[0] != B or head != list(k.shape[2:]) or s >= self.window:
            raise ValueError(
                f"this state is of another shape: {list(state.k.shape)}; x needs "
                f"{[k.shape[0], f'at most {self.window - 1}', *k.shape[2:]]}"
            )


class WindowSlots:
    """Ring buffers of one window for sequences of different lengths: k and v [count,H,window,W].

    The token at position p stands in column p % window, over the one that leaves the window.
    """

    grows = False

    def __init__(self, mixer: SlidingWindow, k: Tensor, v: Tensor) -> None:
        self._mixer, self.k, self.v = mixer, k, v
        self._rows = torch.arange(k.shape[0], device=k.device)
        self._columns = torch.arange(k.shape[2], device=k.device)
        if mixer.rotary:
            self._angles = rotary_angles(k.shape[2], k.shape[3], k.device)  # [window,W/2]

    def put(self, slot: int, state: WindowCache, length: int) -> None:
        """Copy the cache of one sequence, its last tokens, into a slot."""
        kept = state.k.shape[1]
        columns = torch.arange(length - kept, length, device=self.k.device) % self._mixer.window
        for mine, given in ((self.k, state.k), (self.v, state.v)):
            mine[slot][:, columns] = given[0].transpose(0, 1).to(mine.dtype)

    def get(self, slot: int, length: int) -> WindowCache:
        """Return a copy of the cache in a slot: the last window - 1 tokens, or fewer, in order."""
        kept = min(length, self._mixer.window - 1)
        columns = torch.arange(length - kept, length, device=self.k.device) % self._mixer.window
        k, v = (each[slot : slot + 1][:, :, columns].transpose(1, 2).contiguous() for each in (self.k, self.v))
        return WindowCache(k, v)

    def step(self, x: Tensor, lengths: Tensor, longest: int) -> Tensor:
        """Return attention [count,1,D] of one more token per slot to its window, and put it into the ring."""
        window = self._mixer.window
        q, k, v = (each.transpose(1, 2) for each in self._mixer._project(x))  # [count,H,1,W]
        column = lengths % window
        self.k[self._rows, :, column] = k[:, :, 0].to(self.k.dtype)
        self.v[self._rows, :, column] = v[:, :, 0].to(self.v.dtype)
        distance = (lengths.unsqueeze(1) - self._columns) % window  # [count,window]: how long ago each column was
        keys = self.k
        if self._mixer.rotary:  # positions count from the token that is about to leave the window
            q = rotate(q.transpose(1, 2), self._angles[-1:]).transpose(1, 2)
            keys = rotate(keys, self._angles[window - 1 - distance])
        seen = distance <= lengths.unsqueeze(1)
        o = functional.scaled_dot_product_attention(q, keys, self.v, attn_mask=seen[:, None, None])
        return self._mixer.out_proj(o.transpose(1, 2).flatten(-2))

    def reserve(self, capacity: int) -> None:
        """Do nothing: a window does not grow."""

    def tensors(self) -> list[Tensor]:
        """Return the ring buffers."""
        return [self.k, self.v]


def local_attention(
    q: Tensor, k: Tensor, v: Tensor, window: int, dropout: float = 0.0, documents: Tensor | None = None
) -> Tensor:
    """Return softmax attention within the window, o [B,T,H,W], of q [B,T,H,W] and k, v [B,P+T,H,W].

    The first P < window keys and values are past tokens. `documents` [B,T] numbers the document of each token; tokens
    then see their own document only (and P = 0).

    Queries go in chunks of L >= window, each with its own L keys and the L keys before: T x 2L scores, not T x T.
    """
    B, T, H, W = q.shape
    past, L = k.shape[1] - T, min(max(window, 32), T)
    if window > L:  # one chunk, and a past that may be longer than it
        mask = _band(T, past + T, past, window, q.device)
        if documents is not None:
            mask = mask & (documents.unsqueeze(2) == documents.unsqueeze(1)).unsqueeze(1)  # [B,1,T,T]
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout).transpose(1, 2)
    chunks = -(-T // L)
    tail, front = chunks * L - T, L - past
    q = _chunks(functional.pad(q, (0, 0, 0, 0, 0, tail)), L)
    k, v = (_chunks(functional.pad(each, (0, 0, 0, 0, front, tail)), L) for each in (k, v))
    k, v = (torch.cat([each[:-1], each[1:]], dim=2) for each in (k, v))  # [n,BH,2L,W]: each chunk after the one before
    mask = _band(L, 2 * L, L, window, q.device).repeat(chunks, 1, 1, 1)
    mask[0, :, :, :front] = False  # padding before the first token
    if documents is not None:
        numbers = functional.pad(documents, (front, tail), value=-1).view(B, -1, L).transpose(0, 1)  # [n+1,B,L]
        same = numbers[1:].unsqueeze(3) == torch.cat([numbers[:-1], numbers[1:]], dim=2).unsqueeze(2)  # [n,B,L,2L]
        mask = mask & same.repeat_interleave(H, dim=1)
    o = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
    return o.reshape(chunks, B, H, L, W).permute(1, 0, 3, 2, 4).reshape(B, chunks * L, H, W)[:, :T]


def _chunks(x: Tensor, L: int) -> Tensor:
    """Return x [B,nL,H,W] as n chunks [n,BH,L,W]. Chunks come first: one mask per chunk serves all rows and heads."""
    B, _, H, W = x.shape
    return x.reshape(B, -1, L, H, W).permute(1, 0, 3, 2, 4).reshape(-1, B * H, L, W)


def _band(T: int, S: int, past: int, window: int, device: torch.device) -> Tensor:
    """Return which of S keys each of T queries sees, bool [T,S]. The first query stands at key number `past`."""
    distance = torch.arange(past, past + T, device=device).unsqueeze(1) - torch.arange(S, device=device)
    return (distance >= 0) & (distance < window)
