"""The state after some tokens, without their outputs: the states of consecutive shards of a sequence add up.

    S = sum_j phi(k_j) v'_j^T      dv'_j = S_bar^T phi(k_j)      dk_j = (d phi / dk_j)^T (S_bar v'_j)

with v' = [v, 1]. Plain torch on every device: the features of one chunk of tokens at a time, forward and backward.
"""

from typing import Any

import torch
from torch import Tensor

from rebased.ops.backend import accumulate_dtype
from rebased.ops.derivatives import first_derivatives_only
from rebased.ops.polynomial.features import contract, expand, state_order
from rebased.ops.polynomial.state import Coefficients, PolyState, feature_count

CPU_WORDS = 2**20  # numbers of a chunk: a few megabytes stay in a cache; an accelerator needs many
ACCELERATOR_WORDS = 2**28


def summarise(k: Tensor, v: Tensor, *, coefficients: Coefficients) -> PolyState:
    """The state after these tokens alone: k [B, T, H, K], v [B, T, H, V] -> kv [B, H, F, V], z [B, H, F].

    Differentiable once.
    """
    B, _, H, _ = k.shape
    dtype = accumulate_dtype(k.dtype)
    keys = k.permute(0, 2, 3, 1).to(dtype).flatten(0, 1)  # [BH,K,T]
    values = torch.nn.functional.pad(v.to(dtype), (0, 1), value=1.0).transpose(1, 2).flatten(0, 1)  # [BH,T,V+1]
    S = _Summary.apply(keys, values, coefficients).unflatten(0, (B, H))
    return PolyState(kv=S[..., :-1].contiguous(), z=S[..., -1].contiguous())


class _Summary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, k: Tensor, v: Tensor, coefficients: Coefficients) -> Tensor:
        ctx.save_for_backward(k, v)
        ctx.coefficients = coefficients
        # fp64 on a CPU, as in chunked.py, because products with a state cancel; fp32 on a GPU, as in its kernels
        wide = torch.float64 if k.device.type == "cpu" else k.dtype
        S = k.new_zeros(len(k), feature_count(k.shape[1], coefficients), v.shape[2], dtype=wide)
        for tokens in _chunks(k, coefficients):
            S.baddbmm_(expand(k[:, :, tokens], coefficients, wide), v[:, tokens].to(wide))
        return S[:, state_order(k.shape[1], coefficients, k.device)].to(k.dtype)

    @staticmethod
    @first_derivatives_only("poly_state")
    def backward(ctx: Any, dS: Tensor) -> tuple[Tensor, Tensor, None]:
        k, v = ctx.saved_tensors
        dk, dv = torch.empty_like(k), torch.empty_like(v)
        order = state_order(k.shape[1], ctx.coefficients, k.device)
        dS = torch.empty_like(dS).index_copy_(1, order, dS)
        for tokens in _chunks(k, ctx.coefficients):
            phi = expand(k[:, :, tokens], ctx.coefficients, k.dtype)  # [BH,F,C]
            dv[:, tokens] = phi.transpose(1, 2) @ dS
            dk[:, :, tokens] = contract(dS @ v[:, tokens].transpose(1, 2), k[:, :, tokens], ctx.coefficients)
        return dk, dv, None


def _chunks(k: Tensor, coefficients: Coefficients) -> list[slice]:
    """Slices of T: chunks whose features fit CPU_WORDS or ACCELERATOR_WORDS."""
    rows, K, T = k.shape
    words = CPU_WORDS if k.device.type == "cpu" else ACCELERATOR_WORDS
    length = max(64, words // (max(1, rows) * (K * K + feature_count(K, coefficients))))
    return [slice(i, i + length) for i in range(0, T, length)]
