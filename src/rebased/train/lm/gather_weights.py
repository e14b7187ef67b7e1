"""A complete copy of a model whose weights may be sharded over processes."""

import torch
from torch import Tensor

from rebased.models import LanguageModel, LMConfig
from rebased.train.world import World


@torch.no_grad()
def gather_model(model: LanguageModel, config: LMConfig, world: World) -> LanguageModel:
    """A copy of the model with all its weights on this process's device, in eval mode. All processes must call this."""
    with torch.random.fork_rng(devices=[]):  # the initial weights drawn here must not advance the run's random numbers
        copy = LanguageModel(config).to(world.device)
    for target, source in zip(_tensors(copy), _tensors(model), strict=True):
        target.copy_(source.full_tensor() if hasattr(source, "full_tensor") else source)
    return copy.eval()


def _tensors(model: LanguageModel) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]
