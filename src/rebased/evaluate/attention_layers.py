"""The attention matrices of a model's layers, computed from what each layer reads."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rebased.mixers import attention_map, has_attention_map, mixer_name
from rebased.models import LanguageModel

MOST_CELLS = 2**29
"""Weights of one sequence's matrix over all heads, 2 GiB in fp32: longer sequences are refused."""
CELLS_AT_ONCE = 2**25
"""Weights of a batch, 128 MiB in fp32."""


def layers_with_maps(model: LanguageModel) -> dict[int, Any]:
    """The mixers that have an attention matrix, by the number of their layer from 0. ValueError if there is none."""
    found = {n: block.mixer for n, block in enumerate(model.blocks) if has_attention_map(block.mixer)}
    if not found:
        names = ", ".join(dict.fromkeys(mixer_name(block.mixer) for block in model.blocks))
        raise ValueError(
            f"no layer of this model has an attention matrix: its mixers are {names}; probe one with rebased, based, "
            "attention or sliding_window, or give your mixer attention_map and apply_attention"
        )
    return found


@contextmanager
def captured_inputs(model: LanguageModel) -> Iterator[dict[int, Tensor]]:
    """During the block, the input of each layer's mixer in the model's last forward pass, [B,T,D] by layer."""
    inputs: dict[int, Tensor] = {}

    def keep(layer: int) -> Any:
        def hook(_: nn.Module, arguments: Any, output: Tensor) -> None:
            inputs[layer] = output

        return hook

    handles = [block.norm1.register_forward_hook(keep(n)) for n, block in enumerate(model.blocks)]
    try:
        yield inputs
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def attention_of(model: LanguageModel, tokens: Tensor, layer: int) -> Tensor:
    """Return the attention matrices [H,T,T] of one layer (from 0) for one sequence, tokens [T].

    Raises ValueError if there is no such layer, if its mixer has no attention matrix, or if the sequence is too long.
    """
    if not 0 <= layer < len(model.blocks):
        raise ValueError(f"there is no layer {layer}: the model's are 0 to {len(model.blocks) - 1}")
    mixer = model.blocks[layer].mixer
    sequences_at_once({layer: mixer}, len(tokens), "give fewer tokens")
    with captured_inputs(model) as inputs:
        model.hidden(tokens.unsqueeze(0).to(model.embedding.weight.device))
    return attention_map(mixer, inputs[layer])[0].cpu()


def sequences_at_once(mixers: dict[int, Any], seq_len: int, remedy: str) -> int:
    """How many sequences of this length to compute at once. ValueError with the remedy if one is too long."""
    heads = max(int(getattr(mixer, "n_heads", 1)) for mixer in mixers.values())
    cells = heads * seq_len**2
    if cells > MOST_CELLS:
        raise ValueError(
            f"the attention matrices of {seq_len:,} tokens and {heads} heads have {cells:,} weights, more than the "
            f"{MOST_CELLS:,} that are computed at once; {remedy}"
        )
    return max(CELLS_AT_ONCE // cells, 1)
