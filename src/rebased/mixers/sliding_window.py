"""Sliding-window attention: softmax over the last few tokens. Linear in T; its state stops growing at the window."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from rebased.mixers.contract import Earlier, register_mixer
from rebased.mixers.documents import document_numbers
from rebased.mixers.parts import tokens_before

ROTARY_BASE = 10_000.0


class WindowCache(NamedTuple):
    """Keys before rotation: only distances matter, so the window's own count of positions will do."""

    k: Tensor  # [B, s, H, W]  the last s <= window - 1 tokens
    v: Tensor  # [B, s, H, W]


@register_mixer("sliding_window")
class SlidingWindow(nn.Module):
    """Causal softmax attention in which a token sees itself and the window - 1 before it."""

    def __init__(
        self,
        d_model: int,
        *,
        window: int = 64,
        n_heads: int = 1,
        rotary: bool = False,
        qkv_bias: bool = True,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        if window < 1:
            raise ValueError(f"window {window} sees nothing; choose at least 1, the token itself")
        if n_heads < 1 or d_model % n_heads:
            raise ValueError(f"d_model {d_model} is not divisible by n_heads {n_heads}; choose n_heads that divides it")
        if rotary and d_model // n_heads % 2:
            raise ValueError(f"rotary turns pairs of features; a head of {d_model // n_heads} is odd: change n_heads")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout {dropout} is not a probability below 1")
        self.window, self.n_heads, self.rotary, self.dropout = window, n_heads, rotary, dropout
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=qkv_bias)
        self.out_proj = nn.Linear(d_model, d_model)

    def forward(self, x: Tensor) -> Tensor:
        return self.extend(x, self.init_state(x.shape[0], device=x.device, dtype=x.dtype))[0]

    def forward_documents(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        documents = document_numbers(cu_seqlens, x.shape[0] * x.shape[1]).view(x.shape[:2])  # [B,T]
        return self._attend_after(*self._project(x), documents)

    def forward_part(self, x: Tensor, earlier: Earlier) -> Tensor:
        q, k, v = self._project(x)
        past = tokens_before(torch.cat([k, v], dim=-1), earlier, count=self.window - 1)  # [B,s,H,2W]
        past_k, past_v = past.chunk(2, dim=-1)
        return self._attend_after(q, torch.cat([past_k, k], dim=1), torch.cat([past_v, v], dim=1))

    def init_state(
        self, batch: int, *, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> WindowCache:
        weight = self.out_proj.weight
        shape = (batch, 0, self.n_heads, weight.shape[0] // self.n_heads)
        empty = torch.empty(shape, device=device or weight.device, dtype=dtype or weight.dtype)
        return WindowCache(empty, empty)

    def extend(self, x: Tensor, state: WindowCache) -> tuple[Tensor, WindowCache]:
        q, k, v = self._project(x)
        self._check_state(state, k)
        k, v = torch.cat([state.k.to(k.dtype), k], dim=1), torch.cat([state.v.to(v.dtype), v], dim=1)
        kept = min(k.shape[1], self.window - 1)
        after = WindowCache(k[:, k.shape[1] - kept :], v[:, v.shape[1] - kept :])
        return self._attend_after(q, k, v), after

    def state_size(self, seq_len: int) -> int:
        return 2 * min(seq_len, self.window - 1) * self.out_proj.weight.shape[0]

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.n_heads, -1)).unbind(2)  # each [B,T,H,W]
        return q, k, v

    def _attend_after(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        """The queries are the last of the tokens whose keys are given."""
        if self.rotary:
            angles = rotary_angles(k.shape[1], k.shape[3], k.device)
            q, k = rotate(q, angles[-q.shape[1] :]), rotate(k, angles)
        o = local_attention(q, k, v, self.window, self.dropout if self.training else 0.0, documents)
        return self.out_proj(o.flatten(-2))

    def _check_state(self, state: WindowCache, k: Tensor) -> None:
        if not isinstance(state, WindowCache):
            raise ValueError(f"the state must be a WindowCache (init_state makes one); got {type(state).__name__}")
        B, s, *head = state.k.shape
        if k.shape[0] != B or head != list(k.shape[2:]) or s >= self.window:
            raise ValueError(
                f"this state is of another shape: {list(state.k.shape)}; these inputs need "
                f"{[k.shape[0], f'at most {self.window - 1}', *k.shape[2:]]}"
            )


def local_attention(
    q: Tensor, k: Tensor, v: Tensor, window: int, dropout: float = 0.0, documents: Tensor | None = None
) -> Tensor:
    """q [B,T,H,W] against k, v [B,P+T,H,W], the P < window first of them past; o [B,T,H,W].

    `documents` [B,T] is the number of each token's document, where tokens see those of their own alone (and P = 0).

    In blocks of L >= window queries, each with its own L keys and the L before: T x 2L scores instead of T x T.
    """
    B, T, H, W = q.shape
    past, L = k.shape[1] - T, min(max(window, 32), T)
    if window > L:  # one block, and a past that may be longer than it
        mask = _band(T, past + T, past, window, q.device)
        if documents is not None:
            mask = mask & (documents.unsqueeze(2) == documents.unsqueeze(1)).unsqueeze(1)  # [B,1,T,T]
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout).transpose(1, 2)
    blocks = -(-T // L)
    tail, front = blocks * L - T, L - past
    q = _blocks(functional.pad(q, (0, 0, 0, 0, 0, tail)), L)
    k, v = (_blocks(functional.pad(each, (0, 0, 0, 0, front, tail)), L) for each in (k, v))
    k, v = (torch.cat([each[:-1], each[1:]], dim=2) for each in (k, v))  # each block behind the one before it
    mask = _band(L, 2 * L, L, window, q.device).repeat(blocks, 1, 1, 1)
    mask[0, :, :, :front] = False  # before the first token there is nothing
    if documents is not None:
        own = functional.pad(documents, (front, tail), value=-1).view(B, -1, L).transpose(0, 1)  # [n+1,B,L]
        same = own[1:].unsqueeze(3) == torch.cat([own[:-1], own[1:]], dim=2).unsqueeze(2)  # [n,B,L,2L]
        mask = mask & same.repeat_interleave(H, dim=1)
    o = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
    return o.reshape(blocks, B, H, L, W).permute(1, 0, 3, 2, 4).reshape(B, blocks * L, H, W)[:, :T]


def _blocks(x: Tensor, L: int) -> Tensor:
    """[B,nL,H,W] -> [n,BH,L,W]: blocks first, so that one mask a block serves every sequence and head."""
    B, _, H, W = x.shape
    return x.reshape(B, -1, L, H, W).permute(1, 0, 3, 2, 4).reshape(-1, B * H, L, W)


def _band(T: int, S: int, past: int, window: int, device: torch.device) -> Tensor:
    """Which of S keys each of T queries sees, the first query standing at key number `past`."""
    distance = torch.arange(past, past + T, device=device).unsqueeze(1) - torch.arange(S, device=device)
    return (distance >= 0) & (distance < window)


def rotary_angles(length: int, width: int, device: torch.device) -> Tensor:
    """[length, width/2] in fp64: at position 65,536 fp32 would be off by 4e-3 of a radian."""
    rates = ROTARY_BASE ** (-torch.arange(0, width, 2, device=device, dtype=torch.float64) / width)
    return torch.arange(length, device=device, dtype=torch.float64).unsqueeze(1) * rates


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Turn each pair (x_i, x_{i+W/2}) by its position's angle: x [B,T,H,W], angles [T,W/2]."""
    cos, sin = (f(angles).to(x.dtype).unsqueeze(1) for f in (torch.cos, torch.sin))
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, left * sin + right * cos], dim=-1)
