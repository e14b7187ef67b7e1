"""Attention matrices: which mixers have one, and the error of those that have none.

A mixer whose output is a weighted sum of values, o_i = sum_j A_ij v_j, can show A. It is computed again from q and k,
as the equation says: quadratic in T, beside the fast path, never in training.
"""

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from rebased.mixers.contract import describe_mixer


@runtime_checkable
class HasAttentionMap(Protocol):
    """A mixer whose output is a weighted sum of values: it can show its weights."""

    def attention_map(self, x: Tensor) -> Tensor:
        """Return A [B,H,T,T] for x [B,T,D], zero for j > i, in fp32 (fp64 for fp64), without dropout.

        Row i sums to den / (den + eps), where the mixer divides by den + eps; else to 1.
        """

    def apply_attention(self, attention: Tensor, x: Tensor) -> Tensor:
        """Return the output [B,T,D] for x [B,T,D] if the matrix were `attention` [B,H,T,T].

        With attention_map(x) it is forward(x). With another matrix it shows what that part of A is worth.
        """


@runtime_checkable
class HasSimilarity(Protocol):
    """A mixer whose weights are a function of q . k, divided by their sum."""

    def attention_scores(self, x: Tensor) -> Tensor:
        """Return s_ij, the scaled product of query i and key j, also for j > i: x [B,T,D] -> [B,H,T,T], as above."""

    def similarity(self, scores: Tensor) -> Tensor:
        """Return the weight of a pair before it is divided by the sum: scores of any shape -> the same shape."""


def has_attention_map(mixer: nn.Module) -> bool:
    """Return True if the mixer has `attention_map` and `apply_attention`."""
    return isinstance(mixer, HasAttentionMap)


def attention_map(mixer: nn.Module, x: Tensor) -> Tensor:
    """Return the attention matrix [B,H,T,T] of a mixer for x [B,T,D]. Raises ValueError for a mixer without one."""
    if not isinstance(mixer, HasAttentionMap):
        raise ValueError(
            f"{describe_mixer(mixer)} has no attention matrix: its output is not a weighted sum of values; "
            "only mixers with attention_map and apply_attention can be probed (docs/add_a_mixer.md)"
        )
    A = mixer.attention_map(x)
    B, T, _ = x.shape
    if A.ndim != 4 or A.shape[0] != B or A.shape[2:] != (T, T):
        raise ValueError(
            f"{describe_mixer(mixer)} returned the shape {list(A.shape)}; attention_map must return [B, H, T, T], here "
            f"[{B}, H, {T}, {T}]"
        )
    return A


def softmax_map(scores: Tensor, mask: Tensor) -> Tensor:
    """Return softmax over the visible keys: scores [B,H,T,T], mask [T,T] bool (True: visible) -> [B,H,T,T]."""
    return scores.masked_fill(~mask, -torch.inf).softmax(-1)


def weigh(attention: Tensor, v: Tensor) -> Tensor:
    """Return o_i = sum_j A_ij v_j: A [B,H,T,T], v [B,T,H,V] -> [B,T,H,V] in the dtype of v."""
    return torch.einsum("bhij,bjhv->bihv", attention, v.to(attention.dtype)).to(v.dtype)


def scaled_products(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Return scale * (q . k) of every pair: q, k [B,T,H,K] -> [B,H,T,T], in fp32 (fp64 for fp64)."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    return scale * torch.einsum("bihk,bjhk->bhij", q.to(dtype), k.to(dtype))
