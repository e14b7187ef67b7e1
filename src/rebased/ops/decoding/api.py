"""The public functions of a decoding step: each is several operations of the model in one kernel.

A step of decoding reads each weight and each state once and computes little: at small batches its time is the number of
kernels. So a norm is computed by the product that reads it, and a bias, an activation or a residual by the one that
makes it. Where there are many rows, products are those of torch (cuBLAS), with what is around them in few kernels.

None of these functions has a gradient. The plain torch path (reference.py) defines what they compute.
"""

import torch
from torch import Tensor

from rebased.ops.backend import Backend, kernel_path
from rebased.ops.decoding import reference
from rebased.ops.decoding.norm import Norm
from rebased.ops.polynomial.state import Coefficients, PolyState


def linear_step(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: Norm | None = None,
    gelu: bool = False,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """residual + activation(norm(x) weight^T + bias).

    Args:
        x: [S, D], one row per sequence.
        weight: [N, D], in the dtype of x.
        bias: [N], or None for 0.
        norm: what is applied to x before; None for nothing.
        gelu: whether the activation is GELU (the exact one) or nothing.
        residual: [S, N], added last; None for 0. It may be overwritten: use the result instead.
        out: [S, N] that the result is written to; None for a new tensor.
        backend: "triton" needs a GPU. All others take the plain torch path.

    Returns:
        [S, N] in the dtype of x. Sums are in fp32.
    """
    if _on_gpu(backend, x):
        from rebased.ops.decoding.gpu.linear import linear

        return linear(x, weight, bias, norm, gelu, residual, out)
    return reference.linear(x, weight, bias, norm, gelu, residual, out)


def mlp_step(
    x: Tensor,
    norm: Norm,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    *,
    backend: Backend = "auto",
) -> Tensor:
    """x + gelu(norm(x) weight1^T + bias1) weight2^T + bias2: an MLP with its norm and residual.

    Args:
        x: [S, D], one row per sequence. It may be overwritten: use the result instead.
        norm: of the layer.
        weight1, bias1: [N, D] and [N] (or None), in the dtype of x.
        weight2, bias2: [D, N] and [D] (or None), in the dtype of x.
        backend: as in linear_step.

    Returns:
        [S, D] in the dtype of x.
    """
    if _on_gpu(backend, x):
        from rebased.ops.decoding.gpu.linear import mlp

        return mlp(x, norm, weight1, bias1, weight2, bias2)
    h = reference.linear(x, weight1, bias1, norm, True, None, None)
    return reference.linear(h, weight2, bias2, None, False, x, None)


def gated_conv_step_(
    x: Tensor,
    norm: Norm,
    weight: Tensor,
    bias: Tensor | None,
    taps: Tensor,
    taps_bias: Tensor | None,
    state: Tensor,
    *,
    backend: Backend = "auto",
) -> Tensor:
    """x + conv(y) * (y weight^T + bias) + y with y = norm(x): a gated short convolution with its norm and residual.

    Args:
        x: [S, D], one row per sequence.
        norm: of the layer.
        weight, bias: [D, D] and [D] (or None) of the gate, in the dtype of x.
        taps, taps_bias: [D, W] and [D] (or None) of the convolution; the last tap is multiplied with the present token.
        state: [S, W-1, D], contiguous, in the dtype of x: the last W - 1 inputs y. It is overwritten by the next one.
        backend: as in linear_step.

    Returns:
        [S, D] in the dtype of x.
    """
    if _on_gpu(backend, x):
        from rebased.ops.decoding.gpu.convolution import gated_conv_

        return gated_conv_(x, norm, weight, bias, taps, taps_bias, state)
    return reference.gated_conv_(x, norm, weight, bias, taps, taps_bias, state)


def poly_step_(
    qkv: Tensor,
    state: PolyState,
    q_norm: Norm | None,
    k_norm: Norm | None,
    *,
    heads: int,
    key_width: int,
    joint: bool,
    coefficients: Coefficients,
    scale: float,
    eps: float,
    log_decay: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Polynomial attention of one token with the norms of its queries and keys; the state is overwritten.

    Args:
        qkv: [S, H*K + H*K + H*V]: queries, keys and values of all heads, as projected.
        state: the PolyState before the token, with contiguous tensors in fp32. It becomes the state after the token.
        q_norm, k_norm: of queries and keys; None for none. Weights and biases are [H*K], or [K] for all heads.
        heads, key_width: H and K, at most 128.
        joint: whether the features of all heads are normalised together, or those of each head by themselves.
        coefficients, scale, eps: as in poly_attention, as numbers.
        log_decay: [S, H], by which the state fades first: at most 0, not checked. None for nothing.
        backend: as in linear_step.

    Returns:
        [S, H*V] in the dtype of qkv.
    """
    shape = (heads, key_width, joint, coefficients, scale, eps, log_decay)
    if _on_gpu(backend, qkv):
        from rebased.ops.decoding.gpu.polynomial import poly_

        return poly_(qkv, state, q_norm, k_norm, *shape)
    return reference.poly_(qkv, state, q_norm, k_norm, *shape)


def embed_step(
    tokens: Tensor, table: Tensor, positions: Tensor | None, lengths: Tensor, *, backend: Backend = "auto"
) -> Tensor:
    """table[tokens] + positions[lengths].

    Args:
        tokens: [S] int64.
        table: [vocab, D].
        positions: [max_len, D] in the dtype of the table; None for 0. Lengths beyond them take the last one.
        lengths: [S] int64, how many tokens each sequence has read.
        backend: as in linear_step.

    Returns:
        [S, D] in the dtype of the table.
    """
    if _on_gpu(backend, table):
        from rebased.ops.decoding.gpu.tokens import embed

        return embed(tokens, table, positions, lengths)
    return reference.embed(tokens, table, positions, lengths)


def best_tokens(logits: Tensor, seen: Tensor, penalty: Tensor, *, backend: Backend = "auto") -> tuple[Tensor, Tensor]:
    """The most probable token of each row after its repetition penalty, and ln of the sum of exp(logits) before it.

    Args:
        logits: [S, vocab], any float dtype.
        seen: [S, vocab] bool: tokens whose logits are divided by the penalty if positive, and multiplied otherwise.
        penalty: [S] fp32.
        backend: as in linear_step.

    Returns:
        Tokens [S] int64 (of several the first) and log-sums [S] in fp32 (fp64 for fp64). A row with NaN has a log-sum
        of NaN, and any token.
    """
    if _on_gpu(backend, logits):
        from rebased.ops.decoding.gpu.tokens import best

        return best(logits, seen, penalty)
    return reference.best(logits, seen, penalty)


def advance_slots_(
    chosen: Tensor,
    logits: Tensor,
    log_sums: Tensor,
    active: Tensor,
    tokens: Tensor,
    lengths: Tensor,
    drawn: Tensor,
    seen: Tensor,
    *,
    backend: Backend = "auto",
) -> Tensor:
    """The log-probabilities of the chosen tokens. The active slots advance by one token.

    `tokens`, `lengths`, `drawn` and `seen` are overwritten.

    Args:
        chosen: [S] int64, the next tokens.
        logits, log_sums: [S, vocab] and [S], as `best_tokens` takes and returns them.
        active: [S] bool. Nothing of the other slots changes.
        tokens: [S] int64, becomes `chosen`.
        lengths, drawn: [S] int64, each plus 1.
        seen: [S, vocab] bool, True at the chosen token.
        backend: as in linear_step.

    Returns:
        [S] in the dtype of log_sums.
    """
    if _on_gpu(backend, logits):
        from rebased.ops.decoding.gpu.tokens import advance_

        return advance_(chosen, logits, log_sums, active, tokens, lengths, drawn, seen)
    return reference.advance_(chosen, logits, log_sums, active, tokens, lengths, drawn, seen)


def _on_gpu(backend: Backend, x: Tensor) -> bool:
    """True if the kernels compute a call over x. torch.compile gets the plain path, which it fuses itself."""
    return kernel_path(backend, x) == "triton" and not torch.compiler.is_compiling()
