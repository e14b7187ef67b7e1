"""AdamW over two groups of parameters: those that decay and those that do not."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from rebased.runs.lm_config import TextTrain

MOMENTS = ("exp_avg", "exp_avg_sq")


def parameter_groups(parameters: Iterable[nn.Parameter], config: TextTrain) -> list[dict[str, Any]]:
    """`matrices`: embeddings, projections and the taps of convolutions decay; norms and biases, which have one axis,
    do not. Decay would pull ReBased's gamma towards a kernel that is zero everywhere."""
    decays: list[nn.Parameter] = []
    stays: list[nn.Parameter] = []
    for parameter in parameters:
        (decays if config.decay == "all" or parameter.ndim > 1 else stays).append(parameter)
    groups = [
        {"params": decays, "weight_decay": config.weight_decay},
        {"params": stays, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_optimiser(model: nn.Module, config: TextTrain) -> AdamW:
    """With its moments there from the start, so that a checkpoint of any step has the same tensors."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    fused = parameters[0].device.type == "cuda"
    groups = parameter_groups(parameters, config)
    optimiser = AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=fused)
    for parameter in parameters:
        moments = {name: torch.zeros_like(parameter, memory_format=torch.preserve_format) for name in MOMENTS}
        count = torch.zeros((), dtype=torch.float32, device=parameter.device if fused else "cpu")
        optimiser.state[parameter] = {"step": count, **moments}
    return optimiser


def set_step(optimiser: AdamW, step: int) -> None:
    """Every parameter gets a gradient in every step, so the optimiser's counts are the run's."""
    for state in optimiser.state.values():
        count: Tensor = state["step"]
        count.fill_(step)
