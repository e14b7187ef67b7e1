"""The check that no layer of a model looks ahead, to be run before training."""

import torch

from rebased.mixers import check_mixer_causality
from rebased.models.language_model import LanguageModel


@torch.no_grad()
def check_causality(model: LanguageModel, length: int = 32) -> None:
    """Raise a ValueError that names the first mixer of the model that looks ahead, fails or returns a wrong shape.

    One short sequence of random tokens (at most `length`) goes through the layers, on the model's device and in its
    dtype. Each mixer is then called again with later tokens changed: its earlier outputs must stay the same. Weights,
    buffers, training mode and random number streams are left as they are. Call it before torch.compile and before
    weights are distributed.
    """
    config, weight = model.config, model.embedding.weight
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocab_size, (1, min(length, config.max_len)), generator=generator).to(weight.device)
    x = weight[tokens]
    if model.positions is not None:
        x = x + model.positions.weight[: tokens.shape[1]]
    for block in model.blocks:
        x = block.feed(x + check_mixer_causality(block.mixer, block.norm1(x)))
