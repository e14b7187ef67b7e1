"""A decoding step in plain torch: what its kernels compute."""

import torch
from torch import Tensor
from torch.nn import functional

from rebased.ops.backend import accumulate_dtype
from rebased.ops.convolution.api import short_conv_extend
from rebased.ops.decoding.norm import Norm
from rebased.ops.norm.api import layer_norm, rms_norm
from rebased.ops.polynomial.recurrent import extend_
from rebased.ops.polynomial.state import Coefficients, PolyState


def normalise(x: Tensor, norm: Norm | None, groups: int = 1) -> Tensor:
    """The norm of x [..., D], in `groups` groups of features that are normalised by themselves."""
    if norm is None:
        return x
    if groups == 1 and norm.kind == "layer":
        return layer_norm(x, norm.weight, norm.bias, norm.eps)
    parts = x.unflatten(-1, (groups, -1))
    if norm.kind == "layer":
        parts = layer_norm(parts, None, None, norm.eps)
    elif norm.kind == "rms":
        parts = rms_norm(parts, None, norm.eps)
    if norm.weight is not None:
        parts = parts * norm.weight.to(x.dtype).view(-1, parts.shape[-1])
    if norm.bias is not None:
        parts = parts + norm.bias.to(x.dtype).view(-1, parts.shape[-1])
    return parts.flatten(-2)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: Norm | None,
    gelu: bool,
    residual: Tensor | None,
    out: Tensor | None,
) -> Tensor:
    """See api.linear_step."""
    y = functional.linear(normalise(x, norm), weight, bias)
    y = functional.gelu(y) if gelu else y
    y = y if residual is None else residual + y
    return y if out is None else out.copy_(y)


def gated_conv_(
    x: Tensor,
    norm: Norm,
    weight: Tensor,
    bias: Tensor | None,
    taps: Tensor,
    taps_bias: Tensor | None,
    state: Tensor,
) -> Tensor:
    """See api.gated_conv_step_."""
    y = normalise(x, norm).unsqueeze(1)
    mixed, after = short_conv_extend(y, taps, taps_bias, state)
    state.copy_(after)
    return x + torch.addcmul(y, mixed, functional.linear(y, weight, bias)).squeeze(1)


def poly_(
    qkv: Tensor,
    state: PolyState,
    q_norm: Norm | None,
    k_norm: Norm | None,
    heads: int,
    key_width: int,
    joint: bool,
    coefficients: Coefficients,
    scale: float,
    eps: float,
    log_decay: Tensor | None = None,
) -> Tensor:
    """See api.poly_step_."""
    keys = heads * key_width
    q, k, v = qkv.split([keys, keys, qkv.shape[1] - 2 * keys], dim=-1)
    groups = 1 if joint else heads
    q, k = normalise(q, q_norm, groups), normalise(k, k_norm, groups)
    q, k, v = (each.unflatten(-1, (heads, -1)).unsqueeze(1) for each in (q, k, v))  # [S, 1, H, K]
    g = None if log_decay is None else log_decay.unsqueeze(1)  # [S, 1, H]
    return extend_(q, k, v, state, coefficients=coefficients, scale=scale, eps=eps, log_decay=g).flatten(1)


def embed(tokens: Tensor, table: Tensor, positions: Tensor | None, lengths: Tensor) -> Tensor:
    """See api.embed_step."""
    x = functional.embedding(tokens, table)
    return x if positions is None else x + functional.embedding(lengths.clamp(max=len(positions) - 1), positions)


def best(logits: Tensor, seen: Tensor, penalty: Tensor) -> tuple[Tensor, Tensor]:
    """See api.best_tokens."""
    scores, penalty = logits.to(accumulate_dtype(logits.dtype)), penalty.unsqueeze(1)
    penalised = torch.where(seen, torch.where(scores > 0, scores / penalty, scores * penalty), scores)
    return penalised.argmax(-1), scores.logsumexp(-1)


def advance_(
    chosen: Tensor,
    logits: Tensor,
    log_sums: Tensor,
    active: Tensor,
    tokens: Tensor,
    lengths: Tensor,
    drawn: Tensor,
    seen: Tensor,
) -> Tensor:
    """See api.advance_slots_."""
    tokens.copy_(torch.where(active, chosen, tokens))
    lengths.add_(active)
    drawn.add_(active)
    seen.scatter_(1, chosen.unsqueeze(1), seen.gather(1, chosen.unsqueeze(1)) | active.unsqueeze(1))
    return logits.gather(1, chosen.unsqueeze(1)).squeeze(1).to(log_sums.dtype) - log_sums
