"""AdamW and its learning rate, as in the paper."""

import math

import torch
from torch.optim import AdamW, Optimizer

from rebased.models import LanguageModel
from rebased.runs.synthetic_config import TrainConfig


def build_optimiser(model: LanguageModel, config: TrainConfig) -> AdamW:
    """AdamW with weight decay on every parameter: norms, biases and embeddings too, as in the paper.

    On a GPU it is one kernel, and its learning rate a tensor: a captured step reads what is written there later.
    """
    device = model.embedding.weight.device
    on_gpu = device.type == "cuda"
    return AdamW(
        model.parameters(),
        lr=torch.tensor(config.lr, device=device) if on_gpu else config.lr,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=on_gpu or None,
        capturable=on_gpu,
    )


def cosine_lr(config: TrainConfig, epoch: int) -> float:
    """The learning rate of an epoch counted from 0: from lr down to nearly 0, in one stride an epoch."""
    return config.lr * (1 + math.cos(math.pi * epoch / config.epochs)) / 2


def set_lr(optimiser: Optimizer, lr: float) -> None:
    for group in optimiser.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr
