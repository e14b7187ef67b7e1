"""One step of training: gradients of the whole batch, however it is cut, and AdamW."""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from rebased.models import IGNORE, LanguageModel
from rebased.ops import linear_cross_entropy
from rebased.tasks import Examples
from rebased.train.config import TrainConfig


class StepLoss(NamedTuple):
    mean: Tensor  # [] over the labelled tokens of the batch
    labels: Tensor  # [] how many there are


def build_optimiser(model: LanguageModel, config: TrainConfig) -> AdamW:
    """AdamW with weight decay on every parameter: norms, biases and embeddings too, as in the paper."""
    return AdamW(model.parameters(), lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay)


def cosine_lr(config: TrainConfig, epoch: int) -> float:
    """The learning rate of an epoch counted from 0: from lr down to nearly 0, in one stride an epoch."""
    return config.lr * (1 + math.cos(math.pi * epoch / config.epochs)) / 2


def set_lr(optimiser: Optimizer, lr: float) -> None:
    for group in optimiser.param_groups:
        group["lr"] = lr


def backward(model: LanguageModel, batch: Examples, micro_batch: int | None) -> StepLoss:
    """Add the gradient of the mean loss over all labelled tokens of the batch, computed micro_batch rows at a time.

    A mean of the parts' means would weigh a label in a short part more than one in a long part.
    """
    labels = (batch.labels != IGNORE).sum()
    rows = micro_batch or len(batch.inputs)
    mean = torch.zeros((), dtype=model.embedding.weight.dtype, device=batch.inputs.device)
    for x, y in zip(batch.inputs.split(rows), batch.labels.split(rows), strict=True):
        hidden, targets = model.hidden_at_labels(x, y)  # [n,D], [n]
        part = linear_cross_entropy(hidden, model.embedding.weight, targets) / labels
        part.backward()
        mean += part.detach()
    return StepLoss(mean, labels)


def training_step(model: LanguageModel, optimiser: Optimizer, batch: Examples, micro_batch: int | None) -> StepLoss:
    optimiser.zero_grad(set_to_none=True)
    loss = backward(model, batch, micro_batch)
    optimiser.step()
    return loss
