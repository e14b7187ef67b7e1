"""The loss of a linear head without its logits: cross-entropy of hidden @ weight.T, one chunk of rows at a time.

All logits [N, vocab] are never in memory at once. If a gradient is needed, it is computed while a chunk of logits is
there: they are overwritten by softmax - onehot, and two products turn these into shares of the gradients. The backward
then only scales. A step reads and writes each logit five times and computes no logit twice.
"""

import math
from typing import Any

import torch
from torch import Tensor

from rebased.ops.backend import accumulate_dtype, kernel_path, matmul_dtype
from rebased.ops.cross_entropy.reference import losses_and_gradient_
from rebased.ops.derivatives import refuse_forward_mode

HALF_SCALE = 2.0**14  # of softmax - onehot in fp16: fp16 holds up to 65,504, and down to 6e-5 with all digits

GPU_CHUNK_LOGITS = 1 << 28  # logits of a chunk: half a GB in bf16. The gradient of weight is read and written per chunk
CPU_CHUNK_LOGITS = 1 << 20


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The sum of the cross-entropies of hidden @ weight.T over the rows whose target is not IGNORE (-100).

    Under autocast the products are in its dtype. Where torch may use TF32 on a GPU they are in fp16, which has the ten
    mantissa bits of TF32 in half the bytes. The loss and the gradient of weight are always accumulated in fp32.

    Args:
        hidden: [N, D], any float dtype.
        weight: [vocab, D], any float dtype.
        targets: [N], integers from 0 to vocab - 1, or IGNORE.

    Returns:
        [], fp32 (fp64 for fp64 inputs): the sum, 0 if no row counts. Differentiable once in hidden and weight.

    Raises:
        ValueError: if shapes do not match or targets are not integers.
        RuntimeError: on a CPU, if a target is outside of the vocabulary; on a GPU the loss is NaN instead, because a
            check would wait for the device. Also on a second derivative, and on one in forward mode.
    """
    _check(hidden, weight, targets)
    refuse_forward_mode("linear_cross_entropy")
    dtype = matmul_dtype(hidden, weight)
    on_gpu = kernel_path("auto", hidden) == "triton" and dtype != torch.float64
    wanted = torch.is_grad_enabled()
    loss, _, _ = _forward(
        hidden, weight, targets, dtype, wanted and hidden.requires_grad, wanted and weight.requires_grad, on_gpu
    )
    return loss


def linear_argmax(hidden: Tensor, weight: Tensor) -> Tensor:
    """The most likely token of each row: argmax of hidden @ weight.T, one chunk of rows at a time.

    Computed in the dtype of hidden, also under autocast: bf16 cannot tell near logits apart.

    Args:
        hidden: [N, D], any float dtype.
        weight: [vocab, D], any float dtype.

    Returns:
        [N], int64.
    """
    with torch.autocast(hidden.device.type, enabled=False):
        weight = weight.to(hidden.dtype)
        return torch.cat([(rows @ weight.t()).argmax(-1) for rows in hidden.split(_chunk_rows(hidden, weight))])


@torch.library.custom_op("rebased::linear_cross_entropy", mutates_args=())
def _forward(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    dtype: torch.dtype,
    for_hidden: bool,
    for_weight: bool,
    on_gpu: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss and its gradients, each empty if not wanted: of hidden in its dtype, of weight in fp32."""
    run = losses_and_gradient_
    if on_gpu:
        from rebased.ops.cross_entropy import gpu, narrow_gpu

        if dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
            dtype = torch.float16
        if dtype != torch.float32 and hidden.shape[1] <= narrow_gpu.MAX_WIDTH:
            return narrow_gpu.loss_and_gradients(hidden, weight, targets, dtype, for_hidden, for_weight)
        run = gpu.losses_and_gradient_
    scale = HALF_SCALE if dtype == torch.float16 else 1.0
    with torch.autocast(hidden.device.type, enabled=False):
        head = weight.to(dtype)
        losses = hidden.new_zeros(len(hidden), dtype=accumulate_dtype(dtype))
        d_hidden = torch.empty_like(hidden) if for_hidden else hidden.new_empty(0)
        d_weight = torch.zeros_like(weight, dtype=losses.dtype) if for_weight else losses.new_empty(0)
        size = _chunk_rows(hidden, weight)
        for start in range(0, len(hidden), size):
            rows = slice(start, start + size)
            chunk = hidden[rows].to(dtype)
            logits = chunk @ head.t()  # [rows, vocab]
            run(logits, targets[rows], losses[rows], scale if for_hidden or for_weight else None)
            if for_hidden:
                torch.div(_product(logits, head, losses.dtype), scale, out=d_hidden[rows])
            if for_weight:
                _add_product_(d_weight, logits.t(), chunk)
        if scale != 1:
            d_weight /= scale
        return losses.sum(), d_hidden, d_weight


@_forward.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    dtype: torch.dtype,
    for_hidden: bool,
    for_weight: bool,
    on_gpu: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    wide = accumulate_dtype(dtype)
    d_hidden = torch.empty_like(hidden) if for_hidden else hidden.new_empty(0)
    d_weight = torch.empty_like(weight, dtype=wide) if for_weight else hidden.new_empty(0, dtype=wide)
    return hidden.new_empty((), dtype=wide), d_hidden, d_weight


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, _, _, *ctx.wanted, _ = inputs
    ctx.save_for_backward(*output[1:])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, d_loss: Tensor | None, *second: Tensor | None) -> tuple[Tensor | None, ...]:
    if any(each is not None for each in second):
        raise RuntimeError("linear_cross_entropy has no double backward; use cross_entropy of the logits instead")
    d_hidden, d_weight = (
        share * d_loss if wanted and d_loss is not None else None
        for share, wanted in zip(ctx.saved_tensors, ctx.wanted, strict=True)
    )
    return d_hidden, d_weight, None, None, None, None, None


_forward.register_autograd(_differentiate, setup_context=_save)


def _add_product_(total: Tensor, a: Tensor, b: Tensor) -> None:
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += _product(a, b, total.dtype)


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b, accumulated and returned in `dtype` also if a and b are in half precision."""
    if a.dtype == dtype:
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=dtype)
    return a.to(dtype) @ b.to(dtype)


def _chunk_rows(hidden: Tensor, weight: Tensor) -> int:
    return max(1, math.ceil((GPU_CHUNK_LOGITS if hidden.is_cuda else CPU_CHUNK_LOGITS) / len(weight)))


def _check(hidden: Tensor, weight: Tensor, targets: Tensor) -> None:
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1] or targets.shape != hidden.shape[:1]:
        raise ValueError(
            "hidden must be [N,D], weight [vocab,D] and targets [N]; they are "
            f"{list(hidden.shape)}, {list(weight.shape)} and {list(targets.shape)}"
        )
    if targets.is_floating_point():
        raise ValueError(f"targets must be whole numbers, as tokens are; they are {targets.dtype}")
