"""AdamW for every run, and how its learning rate is set."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from rebased.runs.lm_config import LMTrainConfig
from rebased.runs.run_config import Decay
from rebased.runs.synthetic_config import SyntheticTrainConfig


def parameter_groups(parameters: Iterable[nn.Parameter], weight_decay: float, decay: Decay) -> list[dict[str, Any]]:
    """AdamW's parameter groups: parameters that decay and, if there are any, parameters that do not.

    With `matrices` embeddings, projections and the taps of convolutions decay; norms and biases, which have one axis,
    do not. Decay would pull ReBased's gamma towards a kernel that is zero everywhere.
    """
    decayed: list[nn.Parameter] = []
    kept: list[nn.Parameter] = []
    for parameter in parameters:
        (decayed if decay == "all" or parameter.ndim > 1 else kept).append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": kept, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def build_optimiser(
    model: nn.Module,
    settings: SyntheticTrainConfig | LMTrainConfig,
    *,
    capturable: bool = False,
) -> AdamW:
    """AdamW over the model's trainable parameters, fused into one kernel on a GPU.

    settings: lr, betas, eps, weight_decay and decay are read.
    capturable: the learning rate and the step counts are tensors on the GPU, which a CUDA graph reads at every replay.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    device = parameters[0].device
    return AdamW(
        parameter_groups(parameters, settings.weight_decay, settings.decay),
        lr=torch.tensor(settings.lr, device=device) if capturable else settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        fused=device.type == "cuda" or None,
        capturable=capturable,
    )


def set_lr(optimiser: Optimizer, lr: float) -> None:
    """Set the learning rate of all parameter groups, in place where it is a tensor."""
    for group in optimiser.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


MOMENTS = ("exp_avg", "exp_avg_sq")


def make_moments(optimiser: AdamW) -> None:
    """Create the moments that AdamW would create at its first step, so that a checkpoint of any step has them."""
    for group in optimiser.param_groups:
        on_device = group["capturable"] or group["fused"]
        for parameter in group["params"]:
            moments = {name: torch.zeros_like(parameter, memory_format=torch.preserve_format) for name in MOMENTS}
            count = torch.zeros((), dtype=torch.float32, device=parameter.device if on_device else "cpu")
            optimiser.state[parameter] = {"step": count, **moments}
