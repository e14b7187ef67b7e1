"""The loss of a linear head, without its logits: cross-entropy of hidden @ weight.T, a block of rows at a time.

[N,vocab] never stands in memory. Where a gradient will be asked for, it is computed while a block of logits is there:
they are overwritten by softmax - onehot, which two products turn into shares of the gradients. The backward then only
scales. A step reads and writes each logit five times, and no logit is computed twice.
"""

import math
from typing import Any

import torch
from torch import Tensor

from rebased.ops.linear_scan import scan_path
from rebased.ops.polynomial.state import state_dtype

IGNORED = -100
"""The target of a row that counts for nothing (torch's own default)."""

HALF_SCALE = 2.0**14  # of softmax - onehot in fp16: its greatest is 65,504, its least with all digits 6e-5

GPU_BLOCK_LOGITS = 1 << 28  # logits of a block: half a gigabyte in bf16; the weight's gradient is added up once a block
CPU_BLOCK_LOGITS = 1 << 20


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The sum of the cross-entropies of hidden @ weight.T over the rows whose target is not -100.

    hidden [N,D], weight [vocab,D], targets [N] -> [], in fp32 (fp64 for fp64). Under autocast the products are in its
    dtype; where torch may use TF32 on a GPU, they are in fp16, which has TF32's ten digits in half the bytes. The loss
    and the sum of the weight's gradient are fp32 always. A target outside of the vocabulary makes the loss NaN on a
    GPU, where nobody waits to look at it, and is an error on a CPU. There is no second derivative.
    """
    _check(hidden, weight, targets)
    dtype, device = torch.promote_types(hidden.dtype, weight.dtype), hidden.device.type
    if dtype != torch.float64 and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    on_gpu = scan_path("auto", hidden) == "triton" and dtype != torch.float64
    wanted = torch.is_grad_enabled()
    loss, _, _ = _forward(
        hidden, weight, targets, dtype, wanted and hidden.requires_grad, wanted and weight.requires_grad, on_gpu
    )
    return loss


def linear_argmax(hidden: Tensor, weight: Tensor) -> Tensor:
    """The most likely token of each row, hidden [N,D], weight [vocab,D] -> [N], a block of rows at a time too.

    In the inputs' dtype even under autocast: bf16 cannot tell near logits apart.
    """
    with torch.autocast(hidden.device.type, enabled=False):
        weight = weight.to(hidden.dtype)
        return torch.cat([(rows @ weight.t()).argmax(-1) for rows in hidden.split(_block_rows(hidden, weight))])


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
    """The loss and, where wanted (else empty), its gradients: hidden's in its own dtype, the weight's in fp32."""
    if on_gpu:
        from rebased.ops.cross_entropy_triton import losses_and_gradient_
    else:
        losses_and_gradient_ = _losses_and_gradient_
    if on_gpu and dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        dtype = torch.float16
    scale = HALF_SCALE if dtype == torch.float16 else 1.0
    with torch.autocast(hidden.device.type, enabled=False):
        head = weight.to(dtype)
        losses = hidden.new_empty(len(hidden), dtype=state_dtype(dtype))
        d_hidden = torch.empty_like(hidden) if for_hidden else hidden.new_empty(0)
        d_weight = torch.zeros_like(weight, dtype=losses.dtype) if for_weight else losses.new_empty(0)
        size = _block_rows(hidden, weight)
        for start in range(0, len(hidden), size):
            rows = slice(start, start + size)
            block = hidden[rows].to(dtype)
            logits = block @ head.t()  # [rows,vocab]
            losses_and_gradient_(logits, targets[rows], losses[rows], scale if for_hidden or for_weight else None)
            if for_hidden:
                torch.div(_product(logits, head, losses.dtype), scale, out=d_hidden[rows])
            if for_weight:
                _add_product_(d_weight, logits.t(), block)
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
    wide = state_dtype(dtype)
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


def _losses_and_gradient_(logits: Tensor, targets: Tensor, losses: Tensor, scale: float | None) -> None:
    """Write the loss of each row [rows]; in place, logits [rows,vocab] become scale * (softmax - onehot), if any."""
    counts = targets != IGNORED
    at = torch.where(counts, targets, 0).unsqueeze(1)
    logs = torch.log_softmax(logits, 1, dtype=losses.dtype)
    losses.copy_(torch.where(counts, -logs.gather(1, at).squeeze(1), 0))
    if scale is not None:
        softmax = torch.exp(logs, out=logits if logits.dtype == logs.dtype else logs)
        softmax.scatter_add_(1, at, torch.full_like(at, -1, dtype=softmax.dtype))
        softmax[~counts] = 0
        if softmax is not logits:
            logits.copy_(softmax.mul_(scale))


def _add_product_(total: Tensor, a: Tensor, b: Tensor) -> None:
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        total += _product(a, b, total.dtype)


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b, of half precision too in `dtype`."""
    if a.dtype == dtype:
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=dtype)
    return a.to(dtype) @ b.to(dtype)


def _block_rows(hidden: Tensor, weight: Tensor) -> int:
    return max(1, math.ceil((GPU_BLOCK_LOGITS if hidden.is_cuda else CPU_BLOCK_LOGITS) / len(weight)))


def _check(hidden: Tensor, weight: Tensor, targets: Tensor) -> None:
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1] or targets.shape != hidden.shape[:1]:
        raise ValueError(
            "hidden must be [N,D], weight [vocab,D] and targets [N]; they are "
            f"{list(hidden.shape)}, {list(weight.shape)} and {list(targets.shape)}"
        )
    if targets.is_floating_point():
        raise ValueError(f"targets must be whole numbers, which tokens are; they are {targets.dtype}")
