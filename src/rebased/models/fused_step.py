"""A decoder's step in few kernels: each layer's norms, biases, activations and residuals inside its products.

It computes what LanguageModel.step computes, with fewer roundings between, from the operators of rebased.ops.decoding.
A layer that they do not know, such as a mixer of one's own, takes its own step; so does a model that they do not fit.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rebased.mixers import FusedSlots, Slots, check_output
from rebased.mixers.checks import is_plain
from rebased.models.block import MLP, Block
from rebased.models.network import Network
from rebased.models.norm import LayerNorm, RMSNorm
from rebased.ops import Norm, embed_step, linear_step, mlp_step
from rebased.ops.backend import kernel_path

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def can_fuse(model: Network) -> bool:
    """Return True if the model computes what this file does, with weights of one dtype that the kernels take."""
    dtypes = {parameter.dtype for parameter in model.parameters()}
    same = all(getattr(type(model), name) is getattr(Network, name) for name in ("step", "logits"))
    known = type(model.norm) in (LayerNorm, RMSNorm) and all(type(block) is Block for block in model.blocks)
    return same and known and len(dtypes) == 1 and dtypes <= {*DTYPES}


def fuses_by_default(model: Network) -> bool:
    """Return True if steps are fused by default: kernels compute them."""
    return can_fuse(model) and kernel_path("auto", model.embedding.weight) == "triton"


def fused_step_(
    model: Network, tokens: Tensor, layers: Sequence[Slots], lengths: Tensor, longest: int, logits: Tensor
) -> None:
    """Write the logits [S,vocab] of one more token [S] per slot to `logits`, and overwrite the slots.

    Arguments as in LanguageModel.step.
    """
    positions = None if model.positions is None else model.positions.weight
    x = embed_step(tokens, model.embedding.weight, positions, lengths)  # [S,D]
    for block, slots in zip(model.blocks, layers, strict=True):
        x = _feed(block, _mix(block, x, slots, lengths, longest))
    linear_step(x, model.embedding.weight, norm=_norm_of(model.norm), out=logits)


def _mix(block: Block, x: Tensor, slots: Slots, lengths: Tensor, longest: int) -> Tensor:
    """Return x + Mixer(norm1(x)), [S,D] -> [S,D]."""
    if isinstance(slots, FusedSlots):
        return slots.step_fused(x, _norm_of(block.norm1), lengths, longest)
    x1 = block.norm1(x.unsqueeze(1))
    return x + check_output(block.mixer, x1, slots.step(x1, lengths, longest), "step").squeeze(1)


def _feed(block: Block, u: Tensor) -> Tensor:
    """Return u + MLP(norm2(u)), [S,D] -> [S,D]."""
    mlp: Any = block.mlp
    if block.norm2 is None or not is_plain(MLP, mlp) or not is_plain(nn.Linear, mlp.fc1, mlp.fc2):
        return block.feed(u)
    return mlp_step(u, _norm_of(block.norm2), mlp.fc1.weight, mlp.fc1.bias, mlp.fc2.weight, mlp.fc2.bias)


def _norm_of(norm: nn.Module) -> Norm:
    if isinstance(norm, RMSNorm):
        return Norm(norm.weight, None, norm.eps, "rms")
    assert isinstance(norm, LayerNorm)
    return Norm(norm.weight, norm.bias, norm.eps, "layer")
