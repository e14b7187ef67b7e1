"""The loss on text that is not trained on, computed during training."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.distributed.fsdp import FSDPModule

from rebased.data import Windows
from rebased.models import IGNORE
from rebased.train.lm.step import LMStep, to_device


class Validation(NamedTuple):
    """The result of an evaluation during training."""

    loss: float  # mean, in nats per token
    tokens: int  # labelled tokens


@torch.no_grad()
def validate(step: LMStep, windows: Windows, rows: Sequence[int], batch_size: int) -> Validation:
    """The mean loss over the windows `rows`, which are divided among the processes; the same in every process.

    Sums over batches are taken in fp64, always in the same order. The model is left in the mode it was in (train or
    eval). Compiled models run uncompiled here: to compile the forward pass would take longer than most evaluations.
    """
    loss, world = step.loss, step.world
    training = loss.training
    loss.eval()
    sums, labels = [], 0
    with torch.compiler.set_stance("force_eager"):
        for first in range(0, len(rows), batch_size * world.size):
            local_rows = rows[first : first + batch_size * world.size][world.rank :: world.size]
            # All processes must take part in gathering sharded weights: one without rows computes an ignored batch.
            batch = windows.batch(local_rows if len(local_rows) else rows[:1])
            if not len(local_rows):
                batch = batch._replace(labels=torch.full_like(batch.labels, IGNORE))
            sums.append(loss(*to_device(batch, world.device)).detach())
            labels += int((batch.labels != IGNORE).sum())
    if isinstance(loss, FSDPModule):
        loss.reshard()  # a backward pass would do it; until then the optimiser's parameters are not in place
    loss.train(training)
    nats = torch.stack(sums).double().sum()
    total, count = world.total(torch.stack([nats, torch.full_like(nats, labels)])).tolist()
    return Validation(total / count, int(count))
