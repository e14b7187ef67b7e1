"""A trained model in one piece, however its weights are spread over processes."""

import torch
from torch import Tensor

from rebased.models import LanguageModel, LMConfig
from rebased.train.world import World


@torch.no_grad()
def whole_model(model: LanguageModel, config: LMConfig, world: World) -> LanguageModel:
    """A plain copy on this process's device. Sharded weights are gathered, so every process must ask for it."""
    with torch.random.fork_rng(devices=[]):  # the initial weights that are drawn here are nobody's business
        copy = LanguageModel(config).to(world.device)
    for mine, theirs in zip(_tensors(copy), _tensors(model), strict=True):
        mine.copy_(theirs.full_tensor() if hasattr(theirs, "full_tensor") else theirs)
    return copy.eval()


def _tensors(model: LanguageModel) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]
